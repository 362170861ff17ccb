/** Text about reservations for the status bar, the user's own list, and notifications. */

import {
  type IDevice,
  type IProcess,
  type IReservation,
  type IStatus,
  type IWish,
  isFree,
  ownReservations,
  place,
  wish
} from './status';

export const NEAR_S = 600; // an end counts as near when at most this many seconds are left
const NAME_LIMIT = 40; // characters
const LIST_LIMIT = 110; // characters; JupyterLab truncates notifications at 140

export type Level = 'calm' | 'near' | 'over';

export interface IText {
  text: string;
  level: Level;
}

/** Return the devices' labels, such as `GPU0, GPU1 and GPU2`. */
export function labels({ devices }: { devices: IDevice[] }): string {
  return listed(devices.map(device => device.label));
}

/** Return a name for a process: its notebook, command, or pid. */
export function fullName(of: {
  notebook: string | null;
  command: string | null;
  pid: number | null;
}): string {
  return of.notebook ?? of.command ?? `process ${of.pid ?? '?'}`;
}

/** Return a process's name, truncated for a sentence. */
export function name(of: Parameters<typeof fullName>[0]): string {
  return short(fullName(of));
}

/** Return a duration such as `45 s`, `12 min`, `2 h 10 min` or `3 d`, rounded down. */
export function duration(seconds: number): string {
  const [minutes, hours, days] = [60, 3600, 86_400].map(unit =>
    Math.floor(seconds / unit)
  );
  const texts = days
    ? [`${days} d`, hours % 24 && `${hours % 24} h`]
    : hours
      ? [`${hours} h`, minutes % 60 && `${minutes % 60} min`]
      : [minutes ? `${minutes} min` : `${Math.floor(seconds)} s`];
  return texts.filter(Boolean).join(' ');
}

/** Return a time such as `18:00`, with the weekday if it is not today. */
export function clock(seconds: number, now: number): string {
  const [moment, today] = [new Date(seconds * 1000), new Date(now * 1000)];
  const isToday = moment.toDateString() === today.toDateString();
  return moment.toLocaleString('en', {
    ...(isToday ? {} : { weekday: 'short' as const }),
    hour: '2-digit',
    minute: '2-digit',
    hourCycle: 'h23'
  });
}

/** Return text such as `GPU6 · 12 of 80 GiB · until 18:00`, and its urgency. */
export function ofReservation(
  reservation: IReservation,
  status: IStatus,
  now: number
): IText {
  const { holder } = reservation;
  const gpus = labels(reservation);
  if (holder.kept_until !== null) {
    const leftS = Math.max(0, Math.ceil(holder.kept_until - now));
    const text = `${gpus} · kept for the restart (${leftS} s left)`;
    return { text, level: 'near' };
  }
  const texts = [gpus, memory(reservation)];
  let level: Level = 'calm';
  const wanted = wish(status, reservation);
  if (wanted) {
    texts.push(`idle; ${waiting(wanted)}`);
    level = 'near';
  }
  if (holder.overdue !== null) {
    texts.push(`overdue since ${clock(holder.overdue, now)}`);
    level = 'over';
  } else if (holder.until !== null && holder.until < now) {
    texts.push(pastEnd(holder.until, now));
  } else if (holder.until !== null) {
    const leftS = holder.until - now;
    const isNear = leftS < NEAR_S;
    const minutes = Math.max(0, Math.ceil(leftS / 60));
    const job = holder.is_job_end ? ", the job's end" : '';
    const left = isNear ? ` (${minutes} min left)` : '';
    texts.push(`until ${clock(holder.until, now)}${job}${left}`);
    level = isNear ? 'near' : level;
  }
  if (reservation.parts.some(part => part.is_over)) {
    level = 'over';
  }
  return { text: texts.filter(Boolean).join(' · '), level };
}

/** Describe a reservation of the reader that continues because no other process is waiting. */
export function pastEnd(until: number, now: number): string {
  return `past ${clock(until, now)}, kept until another process waits`;
}

/** Return the status bar's text for a kernel; null means that no notebook is active. */
export function ofKernel(
  status: IStatus,
  kernel: string | null,
  now: number
): IText {
  if (status.failure !== null) {
    return { text: 'GPUs: no answer', level: 'calm' };
  }
  if (kernel === null) {
    const free = status.devices.filter(isFree);
    return {
      text: `${free.length} of ${status.devices.length} GPUs free`,
      level: 'calm'
    };
  }
  const held = ownReservations(status)
    .filter(reservation => reservation.holder.kernel === kernel)
    .map(reservation => ofReservation(reservation, status, now));
  const position = place(status, kernel);
  const texts = held.map(each => each.text);
  if (position) {
    texts.push(`waiting (${ordinal(position)} in line)`);
  }
  const level =
    (['over', 'near'] as const).find(one =>
      held.some(each => each.level === one)
    ) ?? 'calm';
  return { text: texts.join('; ') || 'no GPU', level };
}

/** Return an ordinal number: `first`, `second`, `third`, `4th`. */
export function ordinal(position: number): string {
  const words = ['first', 'second', 'third'];
  const suffixes: Record<string, string> = { one: 'st', two: 'nd', few: 'rd' };
  const rule = new Intl.PluralRules('en', { type: 'ordinal' }).select(position);
  return words[position - 1] ?? `${position}${suffixes[rule] ?? 'th'}`;
}

/** Return a sentence such as `train.ipynb has GPU4, until 10:49.` */
export function has(reservation: IReservation, now: number): string {
  const { until } = reservation.holder;
  const end = until === null ? '' : `, until ${clock(until, now)}`;
  return `${name(reservation.holder)} has ${labels(reservation)}${end}.`;
}

/** Return text such as `bob is waiting for 2 GPUs` or `your fold.ipynb is waiting for a GPU`. */
export function waiting({ ticket }: IWish): string {
  return `${owner(ticket)} is waiting for ${short(ticket.asks ?? 'a GPU')}`;
}

/** Return how much a button releases: `Release GPU`, or `Release All 3 GPUs`. */
export function releaseLabel({ devices: { length } }: IReservation): string {
  return length > 1 ? `Release All ${length} GPUs` : 'Release GPU';
}

/** Return the user's name, such as `bob`, or `your fold.ipynb` for the reader's process. */
function owner(process: IProcess): string {
  return process.is_own
    ? `your ${name(process)}`
    : short(process.user ?? 'another user');
}

/** Return `No GPU is free: alice has GPU0 and GPU2, GPU1 is broken.`, or null if one is free. */
export function refusal(status: IStatus): string | null {
  if (!status.devices.length || status.devices.some(isFree)) {
    return null;
  }
  const groups = new Map<string, IDevice[]>();
  for (const device of status.devices) {
    const key = reasonParts(status, device).join('\n');
    groups.set(key, [...(groups.get(key) ?? []), device]);
  }
  let text = '';
  let remaining = status.devices.length;
  for (const [key, devices] of groups) {
    const next = key.replace('\n', labels({ devices }));
    if (text && text.length + next.length > LIST_LIMIT) {
      const are = remaining > 1 ? 'are' : 'is';
      return `No GPU is free: ${text}, and ${remaining} more ${are} not free.`;
    }
    remaining -= devices.length;
    text += text ? `, ${next}` : next;
  }
  return `No GPU is free: ${text}.`;
}

/** Return why a device is not free, as the strings that go before and after its label. */
function reasonParts(status: IStatus, device: IDevice): [string, string] {
  const { holders, next_in_line: next, state } = device;
  // A process without device memory makes a device busy only in exclusive mode.
  const isExclusive = device.compute_mode?.startsWith('exclusive');
  const processes = device.processes.filter(
    ({ memory_mib: mib }) => isExclusive || mib !== 0
  );
  if (holders.length) {
    const owners = [...new Set(holders.map(owner))];
    return [`${listed(owners)} ${owners.length > 1 ? 'have' : 'has'} `, ''];
  }
  if (processes.length) {
    const [{ user }] = processes;
    return [`${short(user ?? 'another user')} uses `, ' without a reservation'];
  }
  if (next) {
    return [`${owner(status.waiting[next - 1])} is next for `, ''];
  }
  return ['', ` is ${state}`];
}

/** Return untrusted text on one line, truncated to the limit. */
function short(text: string): string {
  const line = text.replaceAll(/\s+/g, ' ');
  return line.length > NAME_LIMIT ? `${line.slice(0, NAME_LIMIT)}...` : line;
}

function listed(texts: string[]): string {
  const last = texts.length - 1;
  return last > 0
    ? `${texts.slice(0, last).join(', ')} and ${texts[last]}`
    : texts.join();
}

/** Return used and total memory, such as `12 of 80 GiB`; for a part, the total is that part. */
function memory({ devices, parts }: IReservation): string {
  const isPart = parts.some(part => part.memory_promised_mib !== null);
  const used = sum(
    isPart
      ? parts.map(part => part.memory_used_mib)
      : devices.map(device => device.memory_used_mib)
  );
  const total = sum(
    isPart
      ? parts.map(part => part.memory_promised_mib)
      : devices.map(device => device.memory_total_mib)
  );
  if (total === null) {
    return '';
  }
  const text = `${inGiB(used)} of ${inGiB(total)} GiB`;
  const isOver = parts.some(part => part.is_over);
  return isOver
    ? `${text}, over its limit`
    : isPart
      ? `${text} reserved`
      : text;
}

function sum(values: (number | null)[]): number | null {
  return values.reduce(
    (total, value) => (total === null || value === null ? null : total + value),
    0
  );
}

/** Return an amount of memory in GiB, such as `9.5`. */
export function inGiB(mib: number | null): string {
  return mib === null ? '?' : (mib / 1024).toFixed(1);
}
