/** The last look at the machine, made anew while somebody can see it. */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { Debouncer, Poll } from '@lumino/polling';
import { type ISignal, Signal } from '@lumino/signaling';
import { type IHosts, type IStatus } from './status';

const SHARED_MS = 2100; // the server gives the same answer for two seconds
const HOSTS_MS = 10_000;
const RETRY_MS = 60_000; // at most, after requests that failed
const TICK_MS = 1000; // while seconds are shown

const MISSING =
  "Jupyter's server does not run jupyterlab_reserve_gpu. " +
  'Enable it with `jupyter server extension enable jupyterlab_reserve_gpu`, ' +
  'and start the server again.';

export class Machine {
  status: IStatus | null = null;
  hosts: IHosts | null = null;
  /** Why nothing is known, in a sentence; empty if something is. */
  problem = '';
  /** The kernel of the notebook in front. */
  kernel: string | null = null;
  /** Kernels that ask for a GPU by a click, and have not got an answer yet. */
  asking = new Set<string>();

  /** seesHosts: tells whether somebody can see the other machines. */
  constructor(settings: ServerConnection.ISettings, seesHosts: () => boolean) {
    this._settings = settings;
    const frequency = { interval: 5000, backoff: true, max: RETRY_MS };
    this._poll = new Poll({
      name: 'reserve_gpu:status',
      factory: () => this._look(),
      frequency,
      linger: 0,
      standby: 'when-hidden'
    });
    this._hostsPoll = new Poll({
      name: 'reserve_gpu:hosts',
      factory: () => this._lookElsewhere(),
      frequency: { ...frequency, interval: HOSTS_MS },
      linger: 0,
      standby: () => (seesHosts() ? 'when-hidden' : true)
    });
    this._soon = new Debouncer(() => this._poll.refresh(), SHARED_MS);
    setInterval(() => {
      const every = this.status?.devices.flatMap(({ holders }) => holders);
      if (every?.some(holder => holder.kept_until !== null)) {
        this._changed.emit();
      }
    }, TICK_MS);
  }

  /** The server's clock, in seconds since the epoch. */
  get now(): number {
    return this._ahead_s + Date.now() / 1000;
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  set interval(seconds: number) {
    this._poll.frequency = {
      ...this._poll.frequency,
      interval: seconds * 1000
    };
  }

  /** Show another notebook's kernel. */
  show(kernel: string | null): void {
    this.kernel = kernel;
    this._changed.emit();
  }

  /** Remember whether a kernel asks for a GPU by a click. */
  mark(kernel: string, isAsking: boolean): void {
    if (isAsking) {
      this.asking.add(kernel);
    } else {
      this.asking.delete(kernel);
    }
    this._changed.emit();
  }

  /** Look at once, whatever is known already. */
  async look(): Promise<IStatus> {
    await this._look('status?new=1');
    if (!this.status) {
      throw new Error(this.problem);
    }
    return this.status;
  }

  /** Look again, once the server does. */
  refresh(): void {
    void this._soon.invoke();
  }

  refreshHosts(): void {
    void this._hostsPoll.refresh();
  }

  /** Ask the server, by the browser's own login; body: makes it a POST. */
  async ask<T>(path: string, body?: object): Promise<T> {
    const response = await ServerConnection.makeRequest(
      URLExt.join(this._settings.baseUrl, 'reserve_gpu', path),
      body ? { method: 'POST', body: JSON.stringify(body) } : {},
      this._settings
    );
    if (response.status === 404) {
      throw new Error(MISSING);
    }
    if (!response.ok) {
      throw await ServerConnection.ResponseError.create(response);
    }
    return response.json();
  }

  private async _look(path = 'status'): Promise<void> {
    try {
      const status = await this.ask<IStatus>(path);
      this._ahead_s = status.time - Date.now() / 1000;
      this.problem = status.failure ?? '';
      this.status = status.devices ? status : null; // no devices without reserve_gpu
    } catch (error) {
      this.status = null;
      this.problem = error instanceof Error ? error.message : String(error);
      throw error;
    } finally {
      this._changed.emit();
    }
  }

  private async _lookElsewhere(): Promise<void> {
    this.hosts = await this.ask<IHosts>('status?hosts=1');
    this._changed.emit();
  }

  private _ahead_s = 0;
  private _changed = new Signal<this, void>(this);
  private _hostsPoll: Poll;
  private _poll: Poll;
  private _settings: ServerConnection.ISettings;
  private _soon: Debouncer;
}
