/** The status bar item, and the panel that shows the machine's status. */

import { LabIcon, ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import React from 'react';
import { waitedFor } from './details';
import { type Actions, attempt } from './actions';
import { type Machine } from './model';
import {
  type IReservation,
  type IStatus,
  type ITicket,
  isFree,
  ownReservations
} from './status';
import { MachineView } from './table';
import {
  fullName,
  ofKernel,
  ofReservation,
  ordinal,
  releaseLabel
} from './words';

const SVG = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16">
<g class="jp-icon3" fill="#616161"><path fill-rule="evenodd" d="M1 4h14v8H1zm1.5 1.5v5h11v-5z"/>
<circle cx="5.5" cy="8" r="1.7"/><circle cx="10.5" cy="8" r="1.7"/><path d="M3 13h7v1.5H3z"/></g></svg>`;

export const cardIcon = new LabIcon({
  name: 'jupyterlab-reserve-gpu:card',
  svgstr: SVG
});

interface IOptions {
  machine: Machine;
  actions: Actions;
  /** Opens the panel. */
  open: () => void;
}

export class Item extends ReactWidget {
  constructor(private _options: IOptions) {
    super();
    this.addClass('jp-ReserveGPU-item');
  }

  render(): JSX.Element {
    const { machine } = this._options;
    return <UseSignal signal={machine.changed}>{() => this._item()}</UseSignal>;
  }

  private _item(): JSX.Element {
    const { machine, actions, open } = this._options;
    const { status, kernel, offer, problem } = machine;
    if (!status) {
      return (
        <button onClick={open} title={problem}>
          {problem ? 'GPUs: no answer' : 'GPUs: loading'}
        </button>
      );
    }
    const { text, level } = ofKernel(status, kernel, machine.now);
    const isAsking = kernel !== null && machine.asking.has(kernel);
    return (
      <>
        <button
          className={`jp-mod-${level}`}
          onClick={open}
          title={problem || "Show this machine's GPUs"}
        >
          {isAsking && text === 'no GPU' ? 'requesting a GPU' : text}
        </button>
        {offer && kernel && (
          <button onClick={() => attempt(actions.reserve(kernel))}>
            {offer === 'kept' ? 'Reserve Again' : 'Reserve GPU'}
          </button>
        )}
      </>
    );
  }
}

export class Panel extends ReactWidget {
  constructor(private _options: IOptions) {
    super();
    this.id = 'jupyterlab-reserve-gpu';
    this.addClass('jp-ReserveGPU-panel');
    this.title.icon = cardIcon;
    this.title.caption = "This machine's GPUs";
  }

  protected onAfterShow(): void {
    this._options.machine.refreshHosts();
  }

  render(): JSX.Element {
    const { machine } = this._options;
    return (
      <UseSignal signal={machine.changed}>{() => this._content()}</UseSignal>
    );
  }

  private _content(): JSX.Element {
    const { status, hosts, problem } = this._options.machine;
    return (
      <>
        {problem && <p className="jp-ReserveGPU-problem">{problem}</p>}
        {status && this._yours(status)}
        {status && !status.failure && (
          <section>
            <h2>This Machine</h2>
            <MachineView machine={status} />
          </section>
        )}
        {hosts?.failure && <p>{hosts.failure}</p>}
        {hosts?.hosts.map(({ name, problem: reason, status: other }) => (
          <section key={name}>
            <h2>{name}</h2>
            {other ? <MachineView machine={other} /> : <p>{reason}</p>}
          </section>
        ))}
      </>
    );
  }

  private _yours(status: IStatus): JSX.Element {
    const { kernel, notebook, offer } = this._options.machine;
    const reservations = ownReservations(status);
    const waiting = status.waiting.filter(({ is_own: isOwn }) => isOwn);
    const without =
      offer === 'new' && kernel && this._without(kernel, notebook, status);
    return (
      <section>
        <h2>Yours</h2>
        {!reservations.length && !waiting.length && !without && (
          <p>You hold no GPU on this machine.</p>
        )}
        <ul>
          {reservations.map(each => this._reservation(each, status))}
          {waiting.map(ticket => this._waiter(ticket, status))}
          {without}
        </ul>
      </section>
    );
  }

  /** Offer a GPU for the active notebook, which has none. */
  private _without(
    kernel: string,
    notebook: string,
    status: IStatus
  ): JSX.Element {
    const { actions } = this._options;
    const canReserve = status.devices.some(isFree);
    return (
      <li key="without">
        {heading(notebook)}
        <div>No GPU</div>
        <div className="jp-ReserveGPU-buttons">
          {canReserve
            ? button('Reserve GPU', 'accept', () => actions.reserve(kernel))
            : button('Wait for GPU', 'accept', () =>
                actions.reserve(kernel, true)
              )}
        </div>
      </li>
    );
  }

  private _waiter(ticket: ITicket, status: IStatus): JSX.Element {
    const { actions } = this._options;
    const waited = waitedFor(ticket, status.time);
    const position = ordinal(status.waiting.indexOf(ticket) + 1);
    return (
      <li key={`waits ${ticket.pid}`}>
        {heading(fullName(ticket))}
        <div>
          Waiting for {ticket.asks ?? 'a GPU'}, {position} in line
          {waited && ` · ${waited} so far`}
        </div>
        {ticket.kernel && (
          <div className="jp-ReserveGPU-buttons">
            {button('Stop Waiting', 'reject', () => actions.stop(ticket))}
          </div>
        )}
      </li>
    );
  }

  private _reservation(
    reservation: IReservation,
    status: IStatus
  ): JSX.Element {
    const { actions, machine } = this._options;
    const { holder, pid } = reservation;
    const { text, level } = ofReservation(reservation, status, machine.now);
    const { kernel, kept_until: kept } = holder;
    const canReserve = kernel && kept !== null && !machine.asking.has(kernel);
    const canExtend =
      kernel && kept === null && holder.until !== null && !holder.is_job_end;
    return (
      <li key={pid} className={`jp-mod-${level}`}>
        {heading(fullName(holder))}
        <div>{text}</div>
        <div className="jp-ReserveGPU-buttons">
          {canReserve &&
            button('Reserve Again', 'accept', () => actions.reserve(kernel))}
          {canExtend &&
            button('Extend by 2 h', 'accept', () =>
              actions.prolong(reservation)
            )}
          {button(releaseLabel(reservation), 'reject', () =>
            actions.release(reservation)
          )}
          {kept === null &&
            button(kernel ? 'Shut Down Kernel' : 'End Process', 'warn', () =>
              actions.end(reservation)
            )}
        </div>
      </li>
    );
  }
}

function heading(text: string): JSX.Element {
  return (
    <div className="jp-ReserveGPU-name" title={text}>
      {text}
    </div>
  );
}

/** kind: The JupyterLab class for the main action, another action, or one that loses work. */
function button(
  label: string,
  kind: 'accept' | 'reject' | 'warn',
  act: () => Promise<void>
): JSX.Element {
  return (
    <button
      className={`jp-mod-styled jp-mod-${kind}`}
      onClick={() => attempt(act())}
    >
      {label}
    </button>
  );
}
