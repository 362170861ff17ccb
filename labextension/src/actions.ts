/** What buttons do: the magic in an idle kernel, else its reservation's own socket. */

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
const QUEUED_MS = 700; // a kernel stands in the queue by then, mostly
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

  /** Reserve a GPU for a kernel, or take again what is kept; if none is free, offer to wait. */
  async reserve(kernel: string, waits = false): Promise<void> {
    const machine = this._machine;
    if (machine.asking.has(kernel)) {
      return;
    }
    machine.mark(kernel, true);
    const timer = setTimeout(() => attempt(machine.look()), QUEUED_MS);
    let error;
    try {
      error = await this._run(kernel, `%reserve_gpu${waits ? ' --wait' : ''}`);
      await machine.look();
    } finally {
      clearTimeout(timer);
      machine.mark(kernel, false);
    }
    if (error?.name === NONE_FREE) {
      this._offerToWait(kernel, error.text);
    } else if (error && error.name !== STOPPED) {
      tell(error.text);
    } else if (!waits) {
      this._tellWhatItHas(kernel);
    }
  }

  /** Stop a wait: interrupt its kernel. */
  async stop(ticket: ITicket): Promise<void> {
    const { waiting } = await this._machine.look();
    const model = await this._kernels.findById(ticket.kernel ?? '');
    if (!model || !waiting.some(each => isSame(each, ticket))) {
      throw new Error(`${name(ticket)} waits no more.`);
    }
    const kernel = this._kernels.connectTo({ model });
    await kernel.interrupt().finally(() => kernel.dispose());
    this._machine.refresh();
  }

  /** Release a reservation; ticket: only if that one still waits for it. */
  async release(shown: IReservation, ticket?: ITicket): Promise<void> {
    const { holder, pid } = await this._again(shown);
    const { waiting } = this._machine.status ?? { waiting: [] };
    if (ticket && !waiting.some(each => isSame(each, ticket))) {
      throw new Error(`Nobody waits any more. Nothing was released.`);
    }
    const isIdle =
      holder.kernel &&
      holder.kept_until === null &&
      !(await this._isBusy(holder.kernel));
    if (!holder.kernel || !isIdle) {
      return this._post(pid, holder.since, false);
    }
    const error = await this._run(holder.kernel, '%reserve_gpu --release');
    await this._machine.look();
    tell(
      error?.text ?? `Released ${labels(shown)} of ${name(holder)}.`,
      !error
    );
  }

  /** Move the end of a reservation by two hours. */
  async prolong(shown: IReservation): Promise<void> {
    const {
      kernel,
      until,
      memory_promised_mib: part
    } = (await this._again(shown)).holder;
    if (!kernel || until === null) {
      return;
    }
    const left = Math.max(0, Math.ceil((until - this._machine.now) / 60));
    const what = part !== null ? ` --memory ${part}MiB` : ''; // else it means all of a GPU
    const error = await this._run(
      kernel,
      `%reserve_gpu --for ${left + MORE_MIN}m${what}`,
      until
    );
    await this._machine.look();
    if (error) {
      tell(error.text);
    } else {
      this._tellWhatItHas(kernel);
    }
  }

  /** End a process after a question: a kernel by Jupyter, so that it does not start again. */
  async end(shown: IReservation): Promise<void> {
    const what = shown.holder.kernel ? 'the kernel of ' : '';
    const question = await showDialog({
      title: `End ${what}${name(shown.holder)}?`,
      body: `What it has in memory is lost. ${labels(shown)} ${shown.devices.length > 1 ? 'are' : 'is'} free then.`,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: 'End it' })],
      defaultButton: 0
    });
    if (!question.button.accept) {
      return;
    }
    const { holder, pid } = await this._again(shown);
    if (holder.kernel && holder.kept_until === null) {
      await this._kernels.shutdown(holder.kernel);
      this._machine.refresh();
    } else {
      await this._post(pid, holder.since, true);
    }
  }

  /** Look whether it is still the very reservation that a button was shown for. */
  private async _again(shown: IReservation): Promise<IReservation> {
    const found = ownReservations(await this._machine.look()).find(each =>
      isSame(each.holder, shown.holder)
    );
    if (!found) {
      throw new Error(
        `${name(shown.holder)} does not have ${labels(shown)} any more.`
      );
    }
    return found;
  }

  private _tellWhatItHas(kernel: string): void {
    const { status, now } = this._machine;
    const found = heldBy(status, kernel);
    if (found) {
      tell(has(found, now), true);
    }
  }

  /** Say who has the GPUs, until one is free or the kernel waits or has one. */
  private _offerToWait(kernel: string, text: string): void {
    const machine = this._machine;
    const callback = () => attempt(this.reserve(kernel, true));
    const reason = machine.status && refusal(machine.status);
    const id = Notification.warning(reason ?? text, {
      autoClose: false,
      actions: [{ label: 'Wait for one', callback }]
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
    await this._kernels.refreshRunning(); // else it is some seconds old
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
    await this._machine.look();
    tell(answer.text, answer.is_done);
  }

  /**
   * Run a line in a kernel; a kernel that is busy runs it after its cells. Return what went wrong.
   *
   * until: only if what the kernel holds then still ends at that moment.
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
      ? Notification.info(`The kernel runs a cell. ${line} comes after it.`, {
          autoClose: false
        })
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
      const [, words] = line.split(/ (.*)/);
      const future = kernel.requestExecute({
        code: `${LOAD}\n${condition}get_ipython().run_line_magic('reserve_gpu', '${words ?? ''}')`,
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

/** Say what went wrong, such as a kernel that has ended meanwhile. */
export function attempt(action: Promise<unknown>): void {
  action.catch(error => {
    tell(error instanceof Error ? error.message : String(error));
  });
}

/** Say for some seconds what has been done, or why not. */
function tell(text: string, isDone = false): void {
  const type = isDone ? 'success' : 'error';
  const [line] = text.split('\n');
  const id = Notification.emit(line, type, { autoClose: SHOWN_MS[type] });
  setTimeout(() => Notification.dismiss(id), SHOWN_MS[type]);
}
