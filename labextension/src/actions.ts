/** The buttons' actions. They run the magic in an idle kernel, or use the reservation's socket. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { type Kernel, type KernelMessage } from '@jupyterlab/services';
import { type Machine } from './model';
import {
  type IReservation,
  type ITicket,
  heldBy,
  isSame,
  ownReservations,
  place
} from './status';
import { has, labels, name, refusal } from './words';

const MORE_MIN = 120;
const SHOWN_MS = { success: 5000, error: 15_000 };
const QUEUED_MS = 700; // after this delay, a waiting kernel is usually in the queue
const NONE_FREE = 'NoFreeDeviceError';
const STOPPED = 'WaitInterrupted';
const LOAD =
  "if not get_ipython().find_line_magic('reserve_gpu'): " +
  "get_ipython().run_line_magic('load_ext', 'reserve_gpu')";

export class Actions {
  constructor(machine: Machine, kernels: Kernel.IManager) {
    this._machine = machine;
    this._kernels = kernels;
  }

  /** Reserve a GPU for a kernel, or reclaim the one kept for it. If none is free, offer to wait. */
  async reserve(kernel: string, waits = false): Promise<void> {
    const machine = this._machine;
    if (machine.asking.has(kernel)) {
      return;
    }
    machine.mark(kernel, true);
    const timer = setTimeout(() => attempt(machine.fetchStatus()), QUEUED_MS);
    let error;
    try {
      error = await this._run(kernel, `%reserve_gpu${waits ? ' --wait' : ''}`);
      await machine.fetchStatus();
    } finally {
      clearTimeout(timer);
      machine.mark(kernel, false);
    }
    if (error?.name === NONE_FREE) {
      this._offerToWait(kernel, error.text);
    } else if (error && error.name !== STOPPED) {
      notify(error.text);
    } else if (!waits) {
      this._notifyReserved(kernel);
    }
  }

  /** Stop a kernel's wait in the queue by interrupting the kernel. */
  async stop(ticket: ITicket): Promise<void> {
    const { waiting } = await this._machine.fetchStatus();
    const model = await this._kernels.findById(ticket.kernel ?? '');
    if (!model || !waiting.some(each => isSame(each, ticket))) {
      throw new Error(`${name(ticket)} is no longer waiting.`);
    }
    const kernel = this._kernels.connectTo({ model });
    await kernel.interrupt().finally(() => kernel.dispose());
    this._machine.refresh();
  }

  /** Release a reservation. If a ticket is given, release only if that ticket is still waiting. */
  async release(shown: IReservation, ticket?: ITicket): Promise<void> {
    const { holder, pid } = await this._findCurrent(shown);
    const { waiting } = this._machine.status ?? { waiting: [] };
    if (ticket && !waiting.some(each => isSame(each, ticket))) {
      throw new Error(
        'The other process is no longer waiting. Nothing was released.'
      );
    }
    const isIdle =
      holder.kernel &&
      holder.kept_until === null &&
      !(await this._isBusy(holder.kernel));
    if (!holder.kernel || !isIdle) {
      return this._post(pid, holder.since, false);
    }
    const error = await this._run(holder.kernel, '%reserve_gpu --release');
    await this._machine.fetchStatus();
    notify(
      error?.text ?? `Released ${labels(shown)} of ${name(holder)}.`,
      !error
    );
  }

  /** Extend a reservation by two hours. */
  async prolong(shown: IReservation): Promise<void> {
    const {
      kernel,
      until,
      memory_promised_mib: part
    } = (await this._findCurrent(shown)).holder;
    if (!kernel || until === null) {
      return;
    }
    const leftMin = Math.max(0, Math.ceil((until - this._machine.now) / 60));
    const memory = part !== null ? ` --memory ${part}MiB` : ''; // the default is the whole GPU
    const error = await this._run(
      kernel,
      `%reserve_gpu --for ${leftMin + MORE_MIN}m${memory}`,
      until
    );
    await this._machine.fetchStatus();
    if (error) {
      notify(error.text);
    } else {
      this._notifyReserved(kernel);
    }
  }

  /** End a process after the user confirms. Jupyter shuts kernels down, and won't restart them. */
  async end(shown: IReservation): Promise<void> {
    const isKernel = shown.holder.kernel !== null;
    const label = isKernel ? 'Shut Down' : 'End Process';
    const dialog = await showDialog({
      title: `${isKernel ? 'Shut Down Kernel of' : 'End Process'} ${name(shown.holder)}?`,
      body: `Everything in its memory will be lost, and ${labels(shown)} will be freed.`,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label })],
      defaultButton: 0
    });
    if (!dialog.button.accept) {
      return;
    }
    const { holder, pid } = await this._findCurrent(shown);
    if (holder.kernel && holder.kept_until === null) {
      await this._kernels.shutdown(holder.kernel);
      this._machine.refresh();
    } else {
      await this._post(pid, holder.since, true);
    }
  }

  /** Return the current state of the reservation that a button was shown for. */
  private async _findCurrent(shown: IReservation): Promise<IReservation> {
    const current = ownReservations(await this._machine.fetchStatus()).find(
      each => isSame(each.holder, shown.holder)
    );
    if (!current) {
      throw new Error(
        `${name(shown.holder)} no longer holds ${labels(shown)}.`
      );
    }
    return current;
  }

  private _notifyReserved(kernel: string): void {
    const { status, now } = this._machine;
    const reservation = heldBy(status, kernel);
    if (reservation) {
      notify(has(reservation, now), true);
    }
  }

  /** Offer to wait. Withdraw the offer once a GPU is free or the kernel is waiting or holds one. */
  private _offerToWait(kernel: string, text: string): void {
    const machine = this._machine;
    const callback = () => attempt(this.reserve(kernel, true));
    const reason = machine.status && refusal(machine.status);
    const id = Notification.warning(reason ?? text, {
      autoClose: false,
      actions: [{ label: 'Wait for GPU', callback }]
    });
    const check = () => {
      const { status, asking } = machine;
      const isOver =
        asking.has(kernel) ||
        (status &&
          ((reason && !refusal(status)) ||
            place(status, kernel) ||
            heldBy(status, kernel)));
      if (isOver) {
        machine.changed.disconnect(check);
        Notification.dismiss(id);
      }
    };
    machine.changed.connect(check);
  }

  private async _isBusy(id: string): Promise<boolean> {
    await this._kernels.refreshRunning(); // the cached state can be several seconds old
    const model = await this._kernels.findById(id);
    return (model as { execution_state?: string })?.execution_state !== 'idle';
  }

  private async _post(
    pid: number,
    since: number | null,
    end: boolean
  ): Promise<void> {
    const answer = await this._machine.ask<{ is_done: boolean; text: string }>(
      'release',
      { pid, since, end }
    );
    await this._machine.fetchStatus();
    notify(answer.text, answer.is_done);
  }

  /**
   * Run a line magic in a kernel, and return any error. A busy kernel first runs its queued cells.
   *
   * until: If given, the line runs only if the kernel's reservation still ends at that time.
   */
  private async _run(
    id: string,
    line: string,
    until?: number
  ): Promise<{ name: string; text: string } | null> {
    const model = await this._kernels.findById(id);
    if (!model) {
      throw new Error('The kernel has ended.');
    }
    const queued = (await this._isBusy(id))
      ? Notification.info(
          `The kernel is busy. ${line} will run after its cells.`,
          { autoClose: false }
        )
      : '';
    const kernel = this._kernels.connectTo({ model });
    try {
      const { language_info: language } = await kernel.info;
      if (language.name !== 'python') {
        throw new Error('Only a Python kernel can reserve a GPU.');
      }
      const condition =
        until === undefined
          ? ''
          : `if getattr(getattr(__import__('reserve_gpu').current(), 'lease', None), 'until', None) == ${until}: `;
      const [, magicArguments] = line.split(/ (.*)/);
      const future = kernel.requestExecute({
        code: `${LOAD}\n${condition}get_ipython().run_line_magic('reserve_gpu', '${magicArguments ?? ''}')`,
        store_history: false,
        stop_on_error: false,
        allow_stdin: false
      });
      let error = null as { name: string; text: string } | null;
      future.onIOPub = ({ content, header }) => {
        if (header.msg_type === 'error') {
          const { ename, evalue, traceback } =
            content as KernelMessage.IErrorMsg['content'];
          error = { name: ename, text: traceback.at(-1) ?? evalue };
        }
      };
      await future.done;
      return error;
    } finally {
      kernel.dispose();
      Notification.dismiss(queued);
    }
  }

  private _kernels: Kernel.IManager;
  private _machine: Machine;
}

/** Show an error notification if the action fails, for example because the kernel has ended. */
export function attempt(action: Promise<unknown>): void {
  action.catch(error => {
    notify(error instanceof Error ? error.message : String(error));
  });
}

/** Show a success or error notification for several seconds. */
function notify(text: string, isDone = false): void {
  const type = isDone ? 'success' : 'error';
  const [line] = text.split('\n');
  const id = Notification.emit(line, type, { autoClose: SHOWN_MS[type] });
  setTimeout(() => Notification.dismiss(id), SHOWN_MS[type]);
}
