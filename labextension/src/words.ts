/** Every sentence about a reservation, for the status bar, the panel and notifications. */

import {
  type IReservation,
  type IStatus,
  isWanted,
  ownReservations,
  place
} from './status';

export const NEAR_S = 600; // before an end

export type Level = 'calm' | 'near' | 'over';

export interface IText {
  text: string;
  level: Level;
}

/** Return `GPU0, GPU1`. */
export function labels(reservation: IReservation): string {
  return reservation.devices.map(device => device.label).join(', ');
}

/** Return who has it, in a word. */
export function name(of: {
  notebook: string | null;
  command: string | null;
  pid: number | null;
}): string {
  return of.notebook ?? of.command ?? `process ${of.pid ?? '?'}`;
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
export function ofReservation(reservation: IReservation, now: number): IText {
  const { holder } = reservation;
  const what = labels(reservation);
  if (holder.kept_until !== null) {
    return { text: `${what}, kept for its restart`, level: 'calm' };
  }
  const texts = [what, memory(reservation)];
  let level: Level = 'calm';
  if (isWanted(reservation)) {
    texts.push('idle, and somebody waits');
    level = 'near';
  }
  if (holder.overdue !== null) {
    texts.push(`overdue since ${clock(holder.overdue, now)}`);
    level = 'over';
  } else if (holder.until !== null) {
    const left = holder.until - now;
    const isNear = left < NEAR_S;
    const minutes = Math.max(0, Math.ceil(left / 60));
    texts.push(
      `until ${clock(holder.until, now)}${isNear ? `, in ${minutes} min` : ''}`
    );
    level = isNear ? 'near' : level;
  }
  if (reservation.parts.some(part => part.is_over)) {
    level = 'over';
  }
  return { text: texts.filter(Boolean).join(' · '), level };
}

/** Return what the status bar says of a kernel; null stands for no notebook. */
export function ofKernel(status: IStatus, kernel: string | null): IText {
  const now = status.time;
  if (status.failure !== null) {
    return { text: 'GPUs: no answer', level: 'calm' };
  }
  if (kernel === null) {
    const free = status.devices.filter(
      device => device.state === 'free' && device.next_in_line === null
    );
    return {
      text: `${free.length} of ${status.devices.length} GPUs free`,
      level: 'calm'
    };
  }
  const held = ownReservations(status)
    .filter(reservation => reservation.holder.kernel === kernel)
    .map(reservation => ofReservation(reservation, now));
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
