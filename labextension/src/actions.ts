/** What buttons do: the magic in an idle kernel, else its reservation's own socket. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { type Kernel, type KernelMessage } from '@jupyterlab/services';
import { type Machine } from './model';
import { type IReservation } from './status';
import { labels, name } from './words';

const MORE_MIN = 120;
const NONE_FREE = 'NoFreeDeviceError';
const LOAD =
  "if not get_ipython().find_line_magic('reserve_gpu'): " +
  "get_ipython().run_line_magic('load_ext', 'reserve_gpu')";

interface IOutcome {
  error: string;
  text: string;
}

export class Actions {
  constructor(machine: Machine, kernels: Kernel.IManager) {
    this._machine = machine;
    this._kernels = kernels;
  }

  /** Reserve a GPU for a kernel; if none is free, offer to wait. */
  async reserve(kernel: string, words = ''): Promise<void> {
    const outcome = await this._run(kernel, `%reserve_gpu ${words}`.trim());
    if (outcome?.error === NONE_FREE) {
      const wait = () => attempt(this.reserve(kernel, '--wait'));
      Notification.warning(outcome.text, {
        autoClose: false,
        actions: [{ label: 'Wait for one', callback: wait }]
      });
    } else {
      tell(outcome);
    }
  }

  /** Release what a process holds. */
  async release({ holder, pid }: IReservation): Promise<void> {
    const isIdle =
      holder.kernel &&
      holder.kept_until === null &&
      !(await this._isBusy(holder.kernel));
    if (holder.kernel && isIdle) {
      tell(await this._run(holder.kernel, '%reserve_gpu --release'));
    } else {
      await this._post(pid, false);
    }
  }

  /** Move the end of a reservation by two hours. */
  async prolong(reservation: IReservation, now: number): Promise<void> {
    const { kernel, until, memory_promised_mib: part } = reservation.holder;
    if (kernel && until !== null) {
      const minutes = Math.max(0, Math.ceil((until - now) / 60)) + MORE_MIN;
      const what = part !== null ? `--memory ${part}MiB` : '';
      const line = `%reserve_gpu --for ${minutes}m ${what}`; // else it means all of a GPU
      tell(await this._run(kernel, line.trim()));
    }
  }

  /** End a process after a question: a kernel by Jupyter, so that it does not start again. */
  async end({ holder, pid, ...rest }: IReservation): Promise<void> {
    const { length } = rest.devices;
    const what = labels({ holder, pid, ...rest });
    const question = await showDialog({
      title: `End ${holder.kernel ? 'the kernel of ' : ''}${name(holder)}?`,
      body: `What it has in memory is lost. ${what} ${length > 1 ? 'are' : 'is'} free then.`,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: 'End it' })],
      defaultButton: 0
    });
    if (!question.button.accept) {
      return;
    }
    if (holder.kernel && holder.kept_until === null) {
      await this._kernels.shutdown(holder.kernel);
      this._machine.refresh();
    } else {
      await this._post(pid, true);
    }
  }

  private async _isBusy(id: string): Promise<boolean> {
    await this._kernels.refreshRunning(); // else it is some seconds old
    const model = await this._kernels.findById(id);
    return (model as { execution_state?: string })?.execution_state !== 'idle';
  }

  private async _post(pid: number, end: boolean): Promise<void> {
    const answer = await this._machine.ask<{ is_done: boolean; text: string }>(
      'release',
      { pid, end }
    );
    tell({ error: answer.is_done ? '' : 'refused', text: answer.text });
    this._machine.refresh();
  }

  /** Run a line in a kernel; a kernel that is busy runs it after its cells. */
  private async _run(id: string, line: string): Promise<IOutcome | null> {
    const model = await this._kernels.findById(id);
    if (!model) {
      return { error: 'gone', text: 'The kernel has ended.' };
    }
    if (await this._isBusy(id)) {
      Notification.info(`The kernel runs a cell. ${line} comes after it.`);
    }
    const kernel = this._kernels.connectTo({ model });
    try {
      const { language_info: language } = await kernel.info;
      if (language.name !== 'python') {
        return {
          error: 'language',
          text: 'Only a Python kernel can reserve a GPU.'
        };
      }
      const code = `${LOAD}\n${line}`;
      const future = kernel.requestExecute({
        code,
        store_history: false,
        stop_on_error: false,
        allow_stdin: false
      });
      const texts: string[] = [];
      let outcome: IOutcome | null = null;
      future.onIOPub = message => {
        const { content, header } = message;
        if (header.msg_type === 'error') {
          const { ename, evalue } =
            content as KernelMessage.IErrorMsg['content'];
          outcome = { error: ename, text: evalue };
        } else if (header.msg_type === 'stream') {
          texts.push((content as KernelMessage.IStreamMsg['content']).text);
        } else if (header.msg_type === 'display_data') {
          const { data } = content as KernelMessage.IDisplayDataMsg['content'];
          texts.push(String(data['text/plain'] ?? ''));
        }
      };
      await future.done;
      return outcome ?? { error: '', text: texts.join('\n') };
    } finally {
      kernel.dispose();
      this._machine.refresh();
    }
  }

  private _kernels: Kernel.IManager;
  private _machine: Machine;
}

/** Say what went wrong, such as a kernel that has ended meanwhile. */
export function attempt(action: Promise<void>): void {
  action.catch(error => {
    Notification.error(error instanceof Error ? error.message : String(error));
  });
}

function tell(outcome: IOutcome | null): void {
  if (outcome) {
    const [text] = outcome.text.trim().split('\n');
    const show = outcome.error ? Notification.error : Notification.success;
    show(text || 'Done.', { autoClose: outcome.error ? 15_000 : 5000 });
  }
}
