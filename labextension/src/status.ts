/** What the server says of the machine, and what belongs together in it. */

/** A process that has a device, or waits for one. */
export interface IProcess {
  pid: number | null;
  user: string | null;
  notebook: string | null;
  command: string | null;
  kernel: string | null;
  is_own: boolean;
}

export interface IHolder extends IProcess {
  since: number | null;
  until: number | null;
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
  memory_total_mib: number | null;
  memory_used_mib: number | null;
  holders: IHolder[];
  is_reserved_but_idle: boolean | null;
  next_in_line: number | null;
}

export interface ITicket extends IProcess {
  asks: string | null;
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

/** Return the place in the queue of a kernel, from 1; 0 if it does not wait. */
export function place(status: IStatus, kernel: string): number {
  return status.waiting.findIndex(ticket => ticket.kernel === kernel) + 1;
}

/** Tell whether somebody waits for a device of it that lies idle. */
export function isWanted(reservation: IReservation): boolean {
  return (
    reservation.holder.kept_until === null &&
    reservation.devices.some(
      device => device.is_reserved_but_idle && device.next_in_line !== null
    )
  );
}
