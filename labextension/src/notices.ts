/** Notifications about reservations. Each is shown once, and removed when it no longer applies. */

import { Notification } from '@jupyterlab/apputils';
import { type Actions, attempt } from './actions';
import {
  type IReservation,
  type IStatus,
  isSame,
  ownReservations,
  wish
} from './status';
import {
  clock,
  labels,
  name,
  NEAR_S,
  releaseLabel,
  waiting as describeWait
} from './words';

const LAST_S = 60;

export interface ISwitches {
  tellWaitOver: boolean;
  tellBeforeEnd: boolean;
  tellEnded: boolean;
  tellWanted: boolean;
}

interface INotice {
  which: keyof ISwitches;
  reservation: IReservation;
  text: string;
  type: 'info' | 'warning' | 'error';
  action?: Notification.IAction;
}

export class Notices {
  switches: ISwitches = {
    tellWaitOver: true,
    tellBeforeEnd: true,
    tellEnded: true,
    tellWanted: true
  };

  constructor(actions: Actions) {
    this._actions = actions;
  }

  /** Show new notifications, and dismiss outdated ones, for this server's kernels. */
  update(status: IStatus, now: number): void {
    const held = ownReservations(status).filter(({ holder }) => holder.kernel);
    const waiting = new Set(status.waiting.map(({ kernel }) => kernel));
    this._remember(held, waiting, now);
    const notices = [
      ...held.map(each => this._waitOver(each)),
      ...held.map(each => this._beforeEnd(each, now)),
      ...held.map(each => this._wanted(each, status)),
      ...held.map(overdue),
      ...[...this._ended.values()].map(ended)
    ].filter(notice => notice !== null);
    const keys = new Set(notices.map(keyOf));
    for (const [key, id] of this._shown) {
      if (!keys.has(key)) {
        Notification.dismiss(id);
      }
    }
    for (const notice of notices) {
      const { which, text, type, action } = notice;
      if (this.switches[which] && !this._shown.has(keyOf(notice))) {
        const actions = action ? [action] : [];
        const options = { autoClose: false as const, actions };
        this._shown.set(keyOf(notice), Notification.emit(text, type, options));
      }
    }
  }

  /** Record finished waits, and reservations that ended at their set time. */
  private _remember(
    held: IReservation[],
    waiting: Set<string | null>,
    now: number
  ): void {
    for (const each of held) {
      const { kernel } = each.holder;
      const before = this._held.find(({ holder }) =>
        isSame(holder, each.holder)
      );
      const isNew = !before || labels(before) !== labels(each);
      if (isNew && this._waiting.has(kernel) && !waiting.has(kernel)) {
        this._waited.add(`${each.pid} ${each.holder.since}`);
      }
      this._ended.delete(kernel);
    }
    for (const before of this._held) {
      const { kernel, until, overdue } = before.holder;
      const isGone = !held.some(({ holder }) => holder.kernel === kernel);
      if (isGone && until !== null && until <= now && overdue === null) {
        this._ended.set(kernel, before);
      }
    }
    this._held = held;
    this._waiting = waiting;
  }

  private _waitOver(reservation: IReservation): INotice | null {
    const { pid, since } = reservation.holder;
    return this._waited.has(`${pid} ${since}`)
      ? {
          which: 'tellWaitOver',
          reservation,
          text: `${name(reservation.holder)} got ${labels(reservation)}.`,
          type: 'info'
        }
      : null;
  }

  private _beforeEnd(reservation: IReservation, now: number): INotice | null {
    const { until, since, overdue, is_job_end: isJob } = reservation.holder;
    const left = (until ?? 0) - now;
    const limit = [LAST_S, NEAR_S].find(each => left > 0 && left <= each);
    if (until === null || overdue !== null || !limit) {
      return null;
    }
    if (since !== null && until - since <= limit) {
      return null; // the user has just requested this short reservation
    }
    const within = limit === LAST_S ? 'a minute' : '10 minutes';
    const holder = name(reservation.holder);
    const event = isJob
      ? `The job of ${holder} ends`
      : `${holder} loses ${labels(reservation)}`;
    return {
      which: 'tellBeforeEnd',
      reservation,
      text: `${event} at ${clock(until, now)}, in less than ${within}.`,
      type: 'warning',
      action: isJob
        ? undefined
        : {
            label: 'Extend by 2 h',
            callback: () => attempt(this._actions.prolong(reservation))
          }
    };
  }

  private _wanted(reservation: IReservation, status: IStatus): INotice | null {
    const wanted = wish(status, reservation);
    if (!wanted) {
      return null;
    }
    const are = wanted.devices.length > 1 ? 'are' : 'is';
    return {
      which: 'tellWanted',
      reservation,
      text: `${labels(wanted)} ${are} idle in ${name(reservation.holder)}, and ${describeWait(wanted)}.`,
      type: 'warning',
      action: {
        label: releaseLabel(reservation),
        callback: () =>
          attempt(this._actions.release(reservation, wanted.ticket))
      }
    };
  }

  private _actions: Actions;
  private _ended = new Map<string | null, IReservation>();
  private _held: IReservation[] = [];
  /** IDs of the shown notifications, by key. */
  private _shown = new Map<string, string>();
  private _waited = new Set<string>();
  private _waiting = new Set<string | null>();
}

function keyOf({ text, reservation: { holder } }: INotice): string {
  return `${text} ${holder.pid} ${holder.since}`;
}

function ended(reservation: IReservation): INotice {
  const { holder } = reservation;
  // The text identifies the notification, so it must not change at midnight.
  const end = holder.overdue ?? holder.until;
  const at = end === null ? '' : ` at ${clock(end, end)}`;
  const text = `${name(holder)}'s reservation of ${labels(reservation)} ended${at}.`;
  return { which: 'tellEnded', reservation, text, type: 'info' };
}

function overdue(reservation: IReservation): INotice | null {
  const { text } = ended(reservation);
  return reservation.holder.overdue !== null
    ? {
        which: 'tellEnded',
        reservation,
        text: `${text} The kernel is still using it.`,
        type: 'error'
      }
    : null;
}
