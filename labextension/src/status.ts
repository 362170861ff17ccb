/** What the server says of the machine, and what belongs together in it. */

/** A process that has a device, or waits for one. */
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
  /** Whether that is the end of its job, which nothing here moves. */
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
  processes: { user: string | null }[];
  is_reserved_but_idle: boolean | null;
  idle_for_s: number | null;
  next_in_line: number | null;
}

export interface ITicket extends IProcess {
  asks: string | null;
  /** UUIDs of the devices that would do. */
  wants: string[];
}

/** `failure` is there alone where the server has no reserve_gpu. */
export interface IStatus {
  time: number;
  devices: IDevice[];
  waiting: ITicket[];
  failure: string | null;
  html: string;
}

/** The other machines. */
export interface IHosts {
  hosts: unknown[];
  html: string;
  failure?: string;
}

/** A process of this user and the devices that it has. */
export interface IReservation {
  holder: IHolder;
  pid: number;
  devices: IDevice[];
  /** Its own part of each device, as the device's holders have it. */
  parts: IHolder[];
}

/** Return this user's reservations, in the order of the devices. */
export function ownReservations(status: IStatus): IReservation[] {
  const found = new Map<number, IReservation>();
  for (const device of status.devices) {
    for (const holder of device.holders) {
      if (holder.is_own && holder.pid !== null) {
        const { pid } = holder;
        const before = found.get(pid) ?? {
          holder,
          pid,
          devices: [],
          parts: []
        };
        before.devices.push(device);
        before.parts.push(holder);
        found.set(pid, before);
      }
    }
  }
  return [...found.values()];
}

/** Return the first reservation of a kernel, if it has one. */
export function heldBy(
  status: IStatus | null,
  kernel: string | null
): IReservation | undefined {
  return kernel !== null && status
    ? ownReservations(status).find(({ holder }) => holder.kernel === kernel)
    : undefined;
}

/** Return the place in the queue of a kernel, from 1; 0 if it does not wait. */
export function place(status: IStatus, kernel: string): number {
  return status.waiting.findIndex(ticket => ticket.kernel === kernel) + 1;
}

/** Tell whether two looks show the very same reservation, or wait. */
export function isSame(one: IProcess, other: IProcess): boolean {
  return one.pid === other.pid && one.since === other.since;
}

const IDLE_S = 600; // before that nothing of the user's own is called idle

/** A wait of somebody, and the devices for it that lie idle. */
export interface IWish {
  ticket: ITicket;
  devices: IDevice[];
}

/** Return who comes first of those who wait for what has been idle in a reservation for long. */
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
