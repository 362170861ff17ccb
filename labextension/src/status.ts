/** The server's status of the machine, and functions that select from it. */

/** A process that holds a device or is waiting for one. */
export interface IProcess {
  pid: number | null;
  user: string | null;
  agent: string | null;
  notebook: string | null;
  command: string | null;
  /** The machine from which the kernel was started, if it is a different machine. */
  origin: string | null;
  job: string | null;
  note: string | null;
  since: number | null;
  /** Whether the operating system confirms the process's pid. */
  confirmed: boolean;
  /** Whether the process runs in another container. */
  elsewhere: boolean;
  /** The kernel's ID. Only in the status of this machine. */
  kernel: string | null;
  /** Whether the process belongs to the reader. Only in the status of this machine. */
  is_own?: boolean;
}

export interface IHolder extends IProcess {
  until: number | null;
  /** Whether `until` is the end time of the holder's job, which cannot be changed. */
  is_job_end: boolean;
  /** The idle time in seconds after which the reservation ends. */
  idle_s: number | null;
  /** Whether the reservation ends only if another process is waiting. */
  if_wanted: boolean;
  overdue: number | null;
  kept_until: number | null;
  last_cell: number | null;
  is_dying: boolean;
  is_over: boolean | null;
  is_guest: boolean;
  /** The name of the process whose reservation this process has joined. */
  beside: string | null;
  memory_promised_mib: number | null;
  memory_used_mib: number | null;
}

/** A process that is using a device. */
export interface IUse {
  pid: number;
  user: string | null;
  command: string | null;
  memory_mib: number | null;
  kind: string;
  /** Whether a holder of the device started the process. */
  has_reserved: boolean | null;
  /** The holder that started the process and has ended. */
  left_by: string | null;
}

export interface IDevice {
  label: string;
  state: string;
  reason: string | null;
  index: number;
  instance: unknown;
  uuid: string | null;
  name: string | null;
  memory_total_mib: number | null;
  memory_used_mib: number | null;
  memory_promisable_mib: number | null;
  utilisation_percent: number | null;
  temperature_c: number | null;
  power_w: number | null;
  holders: IHolder[];
  processes: IUse[];
  compute_mode: string | null;
  is_reserved_but_idle: boolean | null;
  idle_for_s: number | null;
  next_in_line: number | null;
}

export interface ITicket extends IProcess {
  asks: string | null;
  /** UUIDs of the devices that would satisfy the request. */
  wants: string[];
}

/** The status of one machine. */
export interface IMachine {
  time: number;
  devices: IDevice[];
  waiting: ITicket[];
  /** Why some reservations could not be read. */
  problem: string | null;
  /** The administrator's message. */
  message: string | null;
  rules: IRules | null;
}

/** The administrator's limits for the user. */
export interface IRules {
  gpus: number | null;
  time_s: number | null;
  idle_s: number | null;
  problems: string[];
}

/** This machine's status. If the server can't import reserve_gpu, only `failure` is present. */
export interface IStatus extends IMachine {
  failure: string | null;
}

/** The status of other machines. `problem` says why a machine sent none. */
export interface IHosts {
  hosts: { name: string; problem: string | null; status: IMachine | null }[];
  failure?: string;
}

/** One of the user's processes, and the devices that it holds. */
export interface IReservation {
  holder: IHolder;
  pid: number;
  devices: IDevice[];
  /** The process's entry among the holders of each device, in the order of `devices`. */
  parts: IHolder[];
}

/** Return the user's reservations, in device order. */
export function ownReservations(status: IStatus): IReservation[] {
  const reservations = new Map<number, IReservation>();
  for (const device of status.devices) {
    for (const holder of device.holders) {
      if (holder.is_own && holder.pid !== null) {
        const { pid } = holder;
        const reservation = reservations.get(pid) ?? {
          holder,
          pid,
          devices: [],
          parts: []
        };
        reservation.devices.push(device);
        reservation.parts.push(holder);
        reservations.set(pid, reservation);
      }
    }
  }
  return [...reservations.values()];
}

/** Return a kernel's first reservation, or undefined if it has none. */
export function heldBy(
  status: IStatus | null,
  kernel: string | null
): IReservation | undefined {
  return kernel !== null && status
    ? ownReservations(status).find(({ holder }) => holder.kernel === kernel)
    : undefined;
}

/** Return a kernel's position in the queue, starting at 1, or 0 if it is not waiting. */
export function place(status: IStatus, kernel: string): number {
  return status.waiting.findIndex(ticket => ticket.kernel === kernel) + 1;
}

/** Return whether a device is free and not offered to a waiter. */
export function isFree({ state, next_in_line: next }: IDevice): boolean {
  return state === 'free' && next === null;
}

/** Return whether two entries describe the same reservation, or the same wait. */
export function isSame(one: IProcess, other: IProcess): boolean {
  return one.pid === other.pid && one.since === other.since;
}

const IDLE_S = 600; // a reserved device counts as idle when unused for this many seconds

/** A waiter, and the idle devices that would satisfy its request. */
export interface IWish {
  ticket: ITicket;
  devices: IDevice[];
}

/** Return the first waiter that could use an idle device of this reservation, or null. */
export function wish(
  status: IStatus,
  { holder, pid, devices }: IReservation
): IWish | null {
  if (holder.kept_until !== null) {
    return null;
  }
  const age = status.time - (holder.since ?? status.time);
  const idle = devices.filter(
    device =>
      device.is_reserved_but_idle && (device.idle_for_s ?? age) >= IDLE_S
  );
  for (const ticket of status.waiting.filter(other => other.pid !== pid)) {
    const wanted = idle.filter(({ uuid }) => ticket.wants.includes(uuid ?? ''));
    if (wanted.length) {
      return { ticket, devices: wanted };
    }
  }
  return null;
}
