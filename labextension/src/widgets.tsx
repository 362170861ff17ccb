/** The status bar item, and the panel that shows the machine's status. */

import { type IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { LabIcon, ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import React from 'react';
import { type Actions, attempt } from './actions';
import { type Machine } from './model';
import {
  type IReservation,
  type IStatus,
  heldBy,
  ownReservations,
  place
} from './status';
import { name, ofKernel, ofReservation, ordinal } from './words';

const SVG = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16">
<g class="jp-icon3" fill="#616161"><path fill-rule="evenodd" d="M1 4h14v8H1zm1.5 1.5v5h11v-5z"/>
<circle cx="5.5" cy="8" r="1.7"/><circle cx="10.5" cy="8" r="1.7"/><path d="M3 13h7v1.5H3z"/></g></svg>`;

const RESERVE = 'reserve one';
const AGAIN = 'reserve it again';

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
    const { status, kernel, problem } = machine;
    if (!status) {
      return (
        <button onClick={open} title={problem}>
          {problem ? 'GPUs: no answer' : 'GPUs: loading'}
        </button>
      );
    }
    const { text, level } = ofKernel(status, kernel, machine.now);
    const isAsking = kernel !== null && machine.asking.has(kernel);
    const offer = kernel !== null && !isAsking && offered(status, kernel);
    return (
      <>
        <button
          className={`jp-mod-${level}`}
          onClick={open}
          title={problem || "Show this machine's GPUs"}
        >
          {isAsking && text === 'no GPU' ? 'requesting a GPU' : text}
        </button>
        {offer && (
          <button onClick={() => attempt(actions.reserve(kernel))}>
            {offer}
          </button>
        )}
      </>
    );
  }
}

export class Panel extends ReactWidget {
  constructor(
    private _options: IOptions,
    private _sanitizer: IRenderMime.ISanitizer
  ) {
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
        {status && this._picture('This machine', status.html)}
        {hosts?.failure && <p>{hosts.failure}</p>}
        {hosts?.html && this._picture('Other machines', hosts.html)}
      </>
    );
  }

  /** Render the HTML status, in which the server has already escaped untrusted text. */
  private _picture(title: string, html: string): JSX.Element | null {
    return html ? (
      <section>
        <h2>{title}</h2>
        <div
          className="jp-ReserveGPU-picture"
          dangerouslySetInnerHTML={{
            __html: labelCells(this._sanitizer.sanitize(html))
          }}
        />
      </section>
    ) : null;
  }

  private _yours(status: IStatus): JSX.Element {
    const { machine, actions } = this._options;
    const reservations = ownReservations(status);
    const waiting = status.waiting.filter(({ is_own }) => is_own);
    const { kernel, asking } = machine;
    const isWithout =
      kernel !== null &&
      !asking.has(kernel) &&
      offered(status, kernel) === RESERVE;
    return (
      <section>
        <h2>Yours</h2>
        {!reservations.length && !waiting.length && (
          <p>You hold no GPU on this machine.</p>
        )}
        <ul>
          {reservations.map(each => this._reservation(each, status))}
          {waiting.map(ticket => (
            <li key={`waits ${ticket.pid}`}>
              <b>{name(ticket)}</b>
              <div>
                Waiting for {ticket.asks ?? 'a GPU'},{' '}
                {ordinal(status.waiting.indexOf(ticket) + 1)} in line
              </div>
              {ticket.kernel && (
                <div className="jp-ReserveGPU-buttons">
                  {button('Stop Waiting', () => actions.stop(ticket))}
                </div>
              )}
            </li>
          ))}
        </ul>
        {isWithout &&
          button('Reserve a GPU for this notebook', () =>
            actions.reserve(kernel)
          )}
      </section>
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
    return (
      <li key={pid} className={`jp-mod-${level}`}>
        <b>{name(holder)}</b>
        <div>{text}</div>
        <div className="jp-ReserveGPU-buttons">
          {kernel &&
            kept !== null &&
            button('Reserve Again', () => actions.reserve(kernel))}
          {button('Release', () => actions.release(reservation))}
          {kernel &&
            kept === null &&
            holder.until !== null &&
            !holder.is_job_end &&
            button('Extend by 2 h', () => actions.prolong(reservation))}
          {kept === null &&
            button(kernel ? 'Shut Down Kernel' : 'End Process', () =>
              actions.end(reservation)
            )}
        </div>
      </li>
    );
  }
}

function button(label: string, act: () => Promise<void>): JSX.Element {
  return (
    <button className="jp-mod-styled" onClick={() => attempt(act())}>
      {label}
    </button>
  );
}

/** Label each cell with its column, for the style sheet, and show truncated text as a tooltip. */
function labelCells(html: string): string {
  const { body } = new DOMParser().parseFromString(html, 'text/html');
  for (const table of body.querySelectorAll('table')) {
    const titles = [...table.querySelectorAll('th')].map(
      title => title.textContent
    );
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, index) => {
        cell.dataset.column = titles[index] ?? '';
      });
      const lines = [...(row.cells[row.cells.length - 1]?.children ?? [])];
      row.title = lines.map(line => line.textContent).join('\n');
    }
  }
  return body.innerHTML;
}

/** Return the status bar's action for a kernel, or an empty string if there is none. */
function offered(status: IStatus, kernel: string): string {
  const held = heldBy(status, kernel);
  if (status.failure !== null || place(status, kernel)) {
    return '';
  }
  return held ? (held.holder.kept_until !== null ? AGAIN : '') : RESERVE;
}
