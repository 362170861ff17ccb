/** The server's status of the machine, and functions that select from it. */

/** A process that holds a device or is waiting for one. */
export interface IProcess {
  pid: number | null;
  user: string | null;
  notebook: string | null;
  command: string | null;
  kernel: string | null;
  since: number | null;
  is_own: boolean;
}

export interface IHolder extends IProcess {
  until: number | null;
  /** Whether `until` is the end time of the holder's job, which cannot be changed. */
  is_job_end: boolean;
  overdue: number | null;
  kept_until: number | null;
  is_over: boolean | null;
  is_guest: boolean;
  memory_promised_mib: number | null;
  memory_used_mib: number | null;
}

export interface IDevice {
  label: string;
  state: string;
  uuid: string | null;
  memory_total_mib: number | null;
  memory_used_mib: number | null;
  holders: IHolder[];
  processes: { user: string | null; memory_mib: number | null }[];
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

/** The status. If the server cannot import reserve_gpu, it has only the field `failure`. */
export interface IStatus {
  time: number;
  devices: IDevice[];
  waiting: ITicket[];
  failure: string | null;
  html: string;
}

/** The status of other machines. */
export interface IHosts {
  hosts: unknown[];
  html: string;
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
