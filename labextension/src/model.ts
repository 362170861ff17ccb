/** The latest status of the machine, which is refreshed while a tab is visible. */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { Debouncer, Poll } from '@lumino/polling';
import { type ISignal, Signal } from '@lumino/signaling';
import { heldBy, type IHosts, type IStatus, place } from './status';

const SHARED_MS = 2100; // the server caches its answer for two seconds
const HOSTS_MS = 10_000;
const RETRY_MS = 60_000; // the longest interval after failed requests
const TICK_MS = 1000; // refresh interval while a countdown is shown

const MISSING =
  'The Jupyter server does not run jupyterlab_reserve_gpu. ' +
  'Enable it with `jupyter server extension enable jupyterlab_reserve_gpu`, ' +
  'and restart the server.';

export class Machine {
  status: IStatus | null = null;
  hosts: IHosts | null = null;
  /** Why the status is unknown, in one sentence; empty if the status is known. */
  problem = '';
  /** The ID of the active notebook's kernel. */
  kernel: string | null = null;
  /** The active notebook's file name. */
  notebook = '';
  /** IDs of the kernels for which a request made by a click is pending. */
  asking = new Set<string>();

  /** seesHosts: Returns whether the view of the other machines is visible. */
  constructor(settings: ServerConnection.ISettings, seesHosts: () => boolean) {
    this._settings = settings;
    const frequency = { interval: 5000, backoff: true, max: RETRY_MS };
    this._poll = new Poll({
      name: 'reserve_gpu:status',
      factory: () => this._fetch(),
      frequency,
      linger: 0,
      standby: 'when-hidden'
    });
    this._hostsPoll = new Poll({
      name: 'reserve_gpu:hosts',
      factory: () => this._fetchHosts(),
      frequency: { ...frequency, interval: HOSTS_MS },
      linger: 0,
      standby: () => (seesHosts() ? 'when-hidden' : true)
    });
    this._soon = new Debouncer(() => this._poll.refresh(), SHARED_MS);
    setInterval(() => {
      const holders = this.status?.devices.flatMap(({ holders }) => holders);
      if (holders?.some(holder => holder.kept_until !== null)) {
        this._changed.emit();
      }
    }, TICK_MS);
  }

  /** The server's current time, in seconds since the epoch. */
  get now(): number {
    return this._ahead_s + Date.now() / 1000;
  }

  /** What a click can reserve for the active notebook: a GPU, the kept one, or nothing. */
  get offer(): 'new' | 'kept' | null {
    const { kernel, status } = this;
    if (!status || status.failure !== null || kernel === null) {
      return null;
    }
    if (this.asking.has(kernel) || place(status, kernel)) {
      return null;
    }
    const held = heldBy(status, kernel);
    return !held ? 'new' : held.holder.kept_until !== null ? 'kept' : null;
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

  /** Show the reservation of a notebook's kernel. */
  show(kernel: string | null, notebook: string): void {
    this.kernel = kernel;
    this.notebook = notebook;
    this._changed.emit();
  }

  /** Set whether a request made by a click is pending for a kernel. */
  mark(kernel: string, isAsking: boolean): void {
    if (isAsking) {
      this.asking.add(kernel);
    } else {
      this.asking.delete(kernel);
    }
    this._changed.emit();
  }

  /** Fetch a new status immediately, bypassing the server's cache. */
  async fetchStatus(): Promise<IStatus> {
    await this._fetch('status?new=1');
    if (!this.status) {
      throw new Error(this.problem);
    }
    return this.status;
  }

  /** Refresh the status as soon as the server's cache has expired. */
  refresh(): void {
    void this._soon.invoke();
  }

  refreshHosts(): void {
    void this._hostsPoll.refresh();
  }

  /** Send a request to the Jupyter server, using POST if there is a body. */
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

  private async _fetch(path = 'status'): Promise<void> {
    try {
      const status = await this.ask<IStatus>(path);
      this._ahead_s = status.time - Date.now() / 1000;
      this.problem = status.failure ?? '';
      // The answer has no devices if the server cannot import reserve_gpu.
      this.status = status.devices ? status : null;
    } catch (error) {
      this.status = null;
      this.problem = error instanceof Error ? error.message : String(error);
      throw error;
    } finally {
      this._changed.emit();
    }
  }

  private async _fetchHosts(): Promise<void> {
    const hosts = await this.ask<IHosts>('status?hosts=1');
    // The answer has no hosts if the server cannot import reserve_gpu.
    this.hosts = hosts.hosts ? hosts : null;
    this._changed.emit();
  }

  private _ahead_s = 0;
  private _changed = new Signal<this, void>(this);
  private _hostsPoll: Poll;
  private _poll: Poll;
  private _settings: ServerConnection.ISettings;
  private _soon: Debouncer;
}
