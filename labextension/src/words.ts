/** Every sentence about a reservation, for the status bar, the panel and notifications. */

import {
  type IDevice,
  type IProcess,
  type IReservation,
  type IStatus,
  type IWish,
  ownReservations,
  place,
  wish
} from './status';

export const NEAR_S = 600; // before an end
const NAME_LIMIT = 40; // characters
const LIST_LIMIT = 110; // of characters: JupyterLab cuts a notification at 140

export type Level = 'calm' | 'near' | 'over';

export interface IText {
  text: string;
  level: Level;
}

/** Return `GPU0, GPU1 and GPU2`. */
export function labels({ devices }: { devices: IDevice[] }): string {
  return listed(devices.map(device => device.label));
}

/** Return who has it, in a word. */
export function name(of: {
  notebook: string | null;
  command: string | null;
  pid: number | null;
}): string {
  return short(of.notebook ?? of.command ?? `process ${of.pid ?? '?'}`);
}

/** Return `18:00`, with the day if it is not today's. */
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

/** Return `GPU6 · 12 of 80 GiB · until 18:00`, and how urgent that is. */
export function ofReservation(
  reservation: IReservation,
  status: IStatus,
  now: number
): IText {
  const { holder } = reservation;
  const what = labels(reservation);
  if (holder.kept_until !== null) {
    const left = Math.max(0, Math.ceil(holder.kept_until - now));
    return { text: `${what}, kept for ${left} s`, level: 'near' };
  }
  const texts = [what, memory(reservation)];
  let level: Level = 'calm';
  const wanted = wish(status, reservation);
  if (wanted) {
    texts.push(`idle; ${waits(wanted)}`);
    level = 'near';
  }
  if (holder.overdue !== null) {
    texts.push(`overdue since ${clock(holder.overdue, now)}`);
    level = 'over';
  } else if (holder.until !== null) {
    const left = holder.until - now;
    const isNear = left < NEAR_S;
    const minutes = Math.max(0, Math.ceil(left / 60));
    const isJob = holder.is_job_end ? ", the job's end" : '';
    const soon = isNear ? `, in ${minutes} min` : '';
    texts.push(`until ${clock(holder.until, now)}${isJob}${soon}`);
    level = isNear ? 'near' : level;
  }
  if (reservation.parts.some(part => part.is_over)) {
    level = 'over';
  }
  return { text: texts.filter(Boolean).join(' · '), level };
}

/** Return what the status bar says of a kernel; null stands for no notebook. */
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
  const number = place(status, kernel);
  const texts = held.map(each => each.text);
  if (number) {
    texts.push(`waits, number ${number}`);
  }
  const level =
    (['over', 'near'] as const).find(one =>
      held.some(each => each.level === one)
    ) ?? 'calm';
  return { text: texts.join('; ') || 'no GPU', level };
}

/** Return `train.ipynb has GPU4, until 10:49.` */
export function has(reservation: IReservation, now: number): string {
  const { until } = reservation.holder;
  const end = until === null ? '' : `, until ${clock(until, now)}`;
  return `${name(reservation.holder)} has ${labels(reservation)}${end}.`;
}

/** Return `bob waits for 2 GPUs`, of one's own `your fold.ipynb waits for a GPU`. */
export function waits({ ticket }: IWish): string {
  return `${who(ticket)} waits for ${short(ticket.asks ?? 'a GPU')}`;
}

/** Return `bob`, or `your fold.ipynb` of a process of the user who reads it. */
function who(one: IProcess): string {
  return one.is_own ? `your ${name(one)}` : short(one.user ?? 'somebody');
}

/** Return `No GPU is free: alice has GPU0 and GPU2, GPU1 is broken.`; null if one is free. */
export function refusal(status: IStatus): string | null {
  if (!status.devices.length || status.devices.some(isFree)) {
    return null;
  }
  const groups = new Map<string, IDevice[]>();
  for (const device of status.devices) {
    const key = whose(status, device).join('\n');
    groups.set(key, [...(groups.get(key) ?? []), device]);
  }
  let text = '';
  let left = status.devices.length;
  for (const [key, devices] of groups) {
    const next = key.replace('\n', labels({ devices }));
    if (text && text.length + next.length > LIST_LIMIT) {
      const are = left > 1 ? 'are' : 'is';
      return `No GPU is free: ${text}, and ${left} more ${are} not free.`;
    }
    left -= devices.length;
    text += text ? `, ${next}` : next;
  }
  return `No GPU is free: ${text}.`;
}

/** Return who has a device, or why nobody can: what stands before its label, and after it. */
function whose(status: IStatus, device: IDevice): [string, string] {
  const { holders, processes, next_in_line: next, state } = device;
  if (holders.length) {
    const every = [...new Set(holders.map(who))];
    return [`${listed(every)} ${every.length > 1 ? 'have' : 'has'} `, ''];
  }
  if (processes.length) {
    const [{ user }] = processes;
    return [`${short(user ?? 'somebody')} uses `, ' without a reservation'];
  }
  if (next) {
    return [`${who(status.waiting[next - 1])} is next for `, ''];
  }
  return ['', ` is ${state}`];
}

function isFree({ state, next_in_line: next }: IDevice): boolean {
  return state === 'free' && next === null;
}

/** Return a text that others have written, on one line and not too long. */
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

/** Return `12 of 80 GiB`; of a part, what is used of that. */
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
  return isOver ? `${text}, over its part` : isPart ? `a part, ${text}` : text;
}

function sum(values: (number | null)[]): number | null {
  return values.reduce(
    (total, value) => (total === null || value === null ? null : total + value),
    0
  );
}

/** Return `9.5`: the memory in GiB. */
function inGiB(mib: number | null): string {
  return mib === null ? '?' : (mib / 1024).toFixed(1);
}
