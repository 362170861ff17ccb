/** Text about a machine's devices, holders and waiters for the panel's tables. */

import {
  type IDevice,
  type IHolder,
  type IMachine,
  type IProcess,
  type IRules,
  type ITicket,
  type IUse,
  isFree
} from './status';
import { clock, duration, inGiB, pastEnd } from './words';

const NEW_S = 600; // idle seconds before the user's own device is displayed as idle
const MINUTE_S = 60;
const LISTED_USES = 3; // maximum number of listed processes that hold no reservation
const FOLDED_FROM = 16; // in a longer table, similar free devices share a row
const LEAST_ALIKE = 3;
const IN_USE = new Set(['busy', 'reserved', 'kept', 'full']); // states

/** A short text about a holder. A mark is a problem, such as `idle for 2 h`. */
export interface IDetail {
  text: string;
  isMark?: boolean;
}

/** A process's user and name, and details about it. */
export interface ILine {
  title: string;
  details: IDetail[];
}

/** Similar neighboring devices, which share a row. Most groups have a single device. */
export type Group = IDevice[];

/** Return a sentence such as `3 of 8 GPUs are free.` */
export function freeDevices({ devices }: IMachine): string {
  const [free, total] = [devices.filter(isFree).length, devices.length];
  if (!total) {
    return 'No GPU found.';
  }
  if (total === 1) {
    return `${devices[0].label} is ${free ? '' : 'not '}free.`;
  }
  const isSplit = devices.some(({ instance }) => instance !== null);
  const noun = isSplit ? 'devices' : 'GPUs';
  if (free === total) {
    return `${total === 2 ? 'Both' : `All ${total}`} ${noun} are free.`;
  }
  const count = free || 'None';
  return `${count} of ${total} ${noun} ${free > 1 ? 'are' : 'is'} free.`;
}

/** Return the model if all devices have the same one, such as `8 x A100-SXM4-80GB`. */
export function sharedModel({ devices }: IMachine): string {
  const names = new Set(devices.map(modelOf).filter(Boolean));
  const isSplit = devices.some(({ instance }) => instance !== null);
  const known = devices.filter(modelOf);
  return names.size === 1 && !isSplit
    ? `${known.length} x ${modelOf(known[0])}`
    : '';
}

/** Return a device's model without the vendor, or an empty string. */
export function modelOf({ name }: IDevice): string {
  return (name ?? '').replace(/^NVIDIA /, '');
}

/** Return the user's limits, such as `Your limits: 2 GPUs, 1 d, idle 2 h.` */
export function limits({ gpus, time_s: time, idle_s: idle }: IRules): string {
  const texts = [
    gpus !== null && `${gpus} GPU${gpus === 1 ? '' : 's'}`,
    time !== null && duration(time),
    idle !== null && `idle ${duration(idle)}`
  ].filter(Boolean);
  return texts.length ? `Your limits: ${texts.join(', ')}.` : '';
}

/** Group the devices into rows. In a long table, similar free neighbors share a row. */
export function groups(devices: IDevice[]): Group[] {
  const single = devices.map(device => [device]);
  if (devices.length <= FOLDED_FROM) {
    return single;
  }
  const runs: Group[] = [];
  for (const device of devices) {
    const run = runs.at(-1);
    if (run && foldKey(run[0]) && foldKey(run[0]) === foldKey(device)) {
      run.push(device);
    } else {
      runs.push([device]);
    }
  }
  return runs.flatMap(run =>
    run.length < LEAST_ALIKE ? run.map(device => [device]) : [run]
  );
}

/** Return a key that similar free devices share, or an empty string for any other device. */
function foldKey(device: IDevice): string {
  const isQuiet =
    isFree(device) &&
    device.instance === null &&
    !device.utilisation_percent &&
    !uses(device).length &&
    !remarks(device).length;
  return isQuiet ? `${device.name} ${memoryOf(device)}` : '';
}

/** Return a device's used and total memory, such as `10.2 of 80.0 GiB`. */
export function memoryOf(device: IDevice): string {
  const { memory_used_mib: used, memory_total_mib: total } = device;
  return used === null && total === null
    ? ''
    : `${inGiB(used)} of ${inGiB(total)} GiB`;
}

/** Return the state to display. */
export function stateOf(device: IDevice): string {
  return device.state === 'free' && !isFree(device) ? 'awaited' : device.state;
}

/** Describe a holder. What other users need to know comes first, and the pid last. */
export function ofHolder(device: IDevice, holder: IHolder, now: number): ILine {
  const { beside, is_dying: isDying, since } = holder;
  const age = since === null ? null : timeSince(since, now);
  return {
    title: title(holder),
    details: [
      ...part(holder),
      ...idle(device, holder, now),
      ...(isDying
        ? [{ text: 'killed, but has not ended', isMark: true }]
        : end(holder, now)),
      ...note(holder),
      ...(age === null ? [] : [{ text: `for ${duration(age)}` }]),
      ...(beside ? [{ text: `joined to ${beside}` }] : []),
      ...pid(holder)
    ]
  };
}

/** Describe a waiter: `bob, fold.ipynb`, `has waited 12 min for 2 GPUs`. */
export function ofWaiter(ticket: ITicket, now: number): ILine {
  const waited = waitedFor(ticket, now);
  const verb = waited ? `has waited ${waited}` : 'is waiting';
  return {
    title: title(ticket),
    details: [
      { text: `${verb} for ${ticket.asks ?? 'a GPU'}` },
      ...note(ticket),
      ...pid(ticket)
    ]
  };
}

/** Return how long a process has been waiting, as `reserve-gpu status` shows it. */
export function waitedFor({ since }: ITicket, now: number): string {
  const seconds = since === null ? null : timeSince(since, now);
  return seconds === null ? '' : duration(seconds);
}

/** Describe the processes that use a device without holding it. */
export function uses(device: IDevice): ILine[] {
  const shown = device.processes.filter(process => isShown(device, process));
  const lines = shown.slice(0, LISTED_USES).map(process => ({
    title: [process.user, process.command].filter(Boolean).join(', '),
    details: [
      process.left_by
        ? { text: `left over from ${process.left_by}`, isMark: true }
        : { text: 'no reservation', isMark: true },
      ...(process.memory_mib === null
        ? []
        : [{ text: `${inGiB(process.memory_mib)} GiB` }]),
      { text: `pid ${process.pid}` }
    ]
  }));
  const more = shown.length - lines.length;
  return more ? [...lines, { title: `${more} more`, details: [] }] : lines;
}

/** Return whether to list a process. Holders' processes and an idle desktop are not listed. */
function isShown(device: IDevice, process: IUse): boolean {
  const isInUse = process.kind !== 'graphics' && process.memory_mib !== 0;
  return !process.has_reserved && (isInUse || device.state === 'busy');
}

/** Return remarks about a device, such as `32.8 GiB available`. */
export function remarks(device: IDevice): string[] {
  const { compute_mode: mode, holders } = device;
  const rest = device.memory_promisable_mib ?? null; // older servers leave it out
  const texts: string[] = [];
  const isShared = holders.some(each => each.memory_promised_mib !== null);
  if (isShared && rest !== null) {
    texts.push(`${(Math.floor(rest / 102.4) / 10).toFixed(1)} GiB available`);
  }
  const isExplained = IN_USE.has(device.state) && device.processes.length > 0;
  if (device.reason && !isExplained) {
    texts.push(device.reason);
  }
  if (mode?.startsWith('exclusive')) {
    texts.push('compute mode is exclusive: one process at a time');
  }
  return texts;
}

/** Return a process's user and name, such as `alice, train.ipynb`. */
function title(process: IProcess): string {
  const { agent, command, notebook, origin, user } = process;
  const owner = `${user ?? 'unknown user'}${agent ? ` (${agent})` : ''}`;
  const name = notebook ?? command;
  return `${owner}${name ? `, ${name}` : ''}${origin ? ` from ${origin}` : ''}`;
}

function part(holder: IHolder): IDetail[] {
  const { memory_promised_mib: promised, memory_used_mib: used } = holder;
  if (promised === null) {
    return [];
  }
  const text = `${inGiB(used)} of ${inGiB(promised)} GiB`;
  return holder.is_over
    ? [{ text: `${text}, over its limit`, isMark: true }]
    : [{ text }];
}

function idle(device: IDevice, holder: IHolder, now: number): IDetail[] {
  const { last_cell: lastCell, since } = holder;
  const seconds = device.idle_for_s;
  const isNew = holder.is_own && (seconds === null || seconds < NEW_S);
  if (!device.is_reserved_but_idle || isNew || isKept(holder, now)) {
    return [];
  }
  if (since === null || seconds === null || seconds < MINUTE_S) {
    return [{ text: 'idle', isMark: true }];
  }
  if (lastCell === null) {
    return [{ text: 'idle', isMark: true }]; // a script might have used it earlier
  }
  const isUnused = lastCell - since < MINUTE_S;
  const text = isUnused ? 'never used' : `idle for ${duration(seconds)}`;
  return [{ text, isMark: true }];
}

/** Describe when a reservation ends, such as `until 18:00 or after 1 h idle`. */
function end(holder: IHolder, now: number): IDetail[] {
  const { beside, idle_s: idleS, is_guest: isGuest, kept_until: kept } = holder;
  if (isKept(holder, now)) {
    const leftS = Math.ceil((kept ?? now) - now);
    return [{ text: `kept for the restart (${leftS} s left)`, isMark: true }];
  }
  if (isGuest && beside === null) {
    const text = 'overdue: the reservation that it joined has been released';
    return [{ text, isMark: true }];
  }
  if (holder.overdue !== null) {
    const text = `overdue since ${clock(holder.overdue, now)}`;
    return [{ text, isMark: true }];
  }
  if (holder.until !== null && holder.until < now) {
    return holder.is_own
      ? [{ text: pastEnd(holder.until, now) }]
      : [
          {
            text: `past ${clock(holder.until, now)}: join the queue to get it`,
            isMark: true
          }
        ];
  }
  const after = idleS === null ? '' : `after ${duration(idleS)} idle`;
  if (holder.until === null) {
    const wanted = holder.if_wanted ? ' if another process waits' : '';
    return after ? [{ text: `released ${after}${wanted}` }] : [];
  }
  const job = holder.is_job_end ? ", the job's end" : '';
  const idleEnd = after && ` or ${after}`;
  const isLonger = holder.if_wanted && !holder.is_job_end;
  const longer = isLonger ? ', longer if no other process waits' : '';
  return [
    { text: `until ${clock(holder.until, now)}${job}${idleEnd}${longer}` }
  ];
}

function isKept(holder: IHolder, now: number): boolean {
  return holder.kept_until !== null && holder.kept_until > now;
}

function note({ note: text }: IProcess): IDetail[] {
  return text ? [{ text: `“${text}”` }] : [];
}

/** Return `pid 4321`, and what is uncertain about it. */
function pid(process: IProcess): IDetail[] {
  const texts = [
    process.pid !== null && `pid ${process.pid}`,
    process.elsewhere && 'in another container',
    process.job && `job ${process.job}`,
    !process.confirmed && !process.elsewhere && 'unverified'
  ].filter(Boolean);
  return texts.length ? [{ text: texts.join(', ') }] : [];
}

/** Return the seconds since a recorded time, or null if it is in the future. */
function timeSince(moment: number, now: number): number | null {
  return moment < now + MINUTE_S ? Math.max(0, now - moment) : null;
}
