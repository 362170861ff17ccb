/** What is told without being asked, once each: from two looks at the machine. */

import { Notification } from '@jupyterlab/apputils';
import { type Actions, attempt } from './actions';
import {
  type IReservation,
  type IStatus,
  isWanted,
  ownReservations
} from './status';
import { clock, labels, name, NEAR_S } from './words';

const LAST_S = 60;

export interface ISwitches {
  tellWaitOver: boolean;
  tellBeforeEnd: boolean;
  tellEnded: boolean;
  tellWanted: boolean;
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

  /** Tell what is new. Only kernels of this server are spoken of. */
  update(status: IStatus): void {
    const now = status.time;
    const held = ownReservations(status).filter(({ holder }) => holder.kernel);
    for (const reservation of held) {
      this._waitOver(reservation);
      this._beforeEnd(reservation, now);
      this._wanted(reservation);
    }
    this._ended(held, now);
    this._held = held;
    this._waiting = new Set(status.waiting.map(({ kernel }) => kernel));
  }

  private _waitOver(reservation: IReservation): void {
    if (this._waiting.has(reservation.holder.kernel)) {
      const text = `${name(reservation.holder)} waits no more: it has ${labels(reservation)}.`;
      this._tell('tellWaitOver', text, `wait ${reservation.holder.since}`);
    }
  }

  private _beforeEnd(reservation: IReservation, now: number): void {
    const { until, since, overdue } = reservation.holder;
    if (until === null || overdue !== null) {
      return;
    }
    const left = until - now;
    const limit = [LAST_S, NEAR_S].find(each => left > 0 && left <= each);
    if (!limit || (since !== null && until - since <= limit)) {
      return; // a short one has just been asked for
    }
    const minutes = Math.ceil(left / 60);
    const text = `${labels(reservation)} of ${name(reservation.holder)} ends at ${clock(until, now)}, in ${minutes} min.`;
    const callback = () => attempt(this._actions.prolong(reservation, now));
    this._tell(
      'tellBeforeEnd',
      text,
      `end ${limit} ${until} ${reservation.pid}`,
      {
        label: '2 h more',
        callback
      }
    );
  }

  private _wanted(reservation: IReservation): void {
    if (isWanted(reservation)) {
      const text = `Somebody waits for ${labels(reservation)}, which lies idle in ${name(reservation.holder)}.`;
      const callback = () => attempt(this._actions.release(reservation));
      this._tell(
        'tellWanted',
        text,
        `wanted ${reservation.pid} ${reservation.holder.since}`,
        {
          label: 'Release',
          callback
        }
      );
    }
  }

  private _ended(held: IReservation[], now: number): void {
    for (const before of this._held) {
      const { until, overdue } = before.holder;
      const still = held.find(({ pid }) => pid === before.pid);
      const isOver = until !== null && until <= now && !still;
      if (isOver || (overdue === null && still?.holder.overdue)) {
        const rest = still ? ' Its kernel still uses it.' : '';
        const text = `The reservation of ${labels(before)} for ${name(before.holder)} has ended.${rest}`;
        this._tell('tellEnded', text, `ended ${before.pid} ${until}`);
      }
    }
  }

  private _tell(
    which: keyof ISwitches,
    text: string,
    once: string,
    action?: { label: string; callback: () => void }
  ): void {
    if (this.switches[which] && !this._told.has(once)) {
      this._told.add(once);
      Notification.info(text, {
        autoClose: false,
        actions: action ? [action] : []
      });
    }
  }

  private _actions: Actions;
  private _held: IReservation[] = [];
  private _told = new Set<string>();
  private _waiting = new Set<string | null>();
}
