/** The JupyterLab and Notebook plugin that shows the machine's GPUs. */

import {
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { Actions, attempt } from './actions';
import { Machine } from './model';
import { type ISwitches, Notices } from './notices';
import { heldBy } from './status';
import { Item, Panel } from './widgets';

const ID = 'jupyterlab-reserve-gpu:plugin';

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: "Shows and manages notebooks' GPU reservations",
  autoStart: true,
  requires: [INotebookTracker],
  optional: [IStatusBar, ICommandPalette, ISettingRegistry, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    statusBar: IStatusBar | null,
    palette: ICommandPalette | null,
    registry: ISettingRegistry | null,
    restorer: ILayoutRestorer | null
  ) => {
    const { kernels, serverSettings } = app.serviceManager;
    const machine: Machine = new Machine(serverSettings, () => panel.isVisible);
    const actions = new Actions(machine, kernels);
    const notices = new Notices(actions);
    const open = () => app.shell.activateById(panel.id);
    const options = { machine, actions, open };
    const panel: Panel = new Panel(options);
    const item = new Item(options);
    item.id = 'jupyterlab-reserve-gpu-item';
    machine.changed.connect(() => {
      if (machine.status && !machine.problem) {
        notices.update(machine.status, machine.now);
      }
      app.commands.notifyCommandChanged();
    });
    app.shell.add(panel, 'right', { rank: 600 });
    restorer?.add(panel, panel.id);
    if (statusBar) {
      statusBar.registerStatusItem(ID, { item, align: 'left', rank: 20 });
    } else {
      app.shell.add(item, 'top', { rank: 900 }); // Notebook
    }
    follow(app.shell, tracker, machine);
    addCommands(app, palette, machine, actions, open);
    void registry?.load(ID).then(settings => {
      const read = () => {
        const { interval, ...switches } =
          settings.composite as unknown as ISwitches & { interval: number };
        machine.interval = interval;
        notices.switches = switches;
      };
      settings.changed.connect(read);
      read();
    });
  }
};

/** Show the active notebook's kernel, and refresh the status after each cell. */
function follow(
  shell: JupyterFrontEnd.IShell,
  tracker: INotebookTracker,
  machine: Machine
): void {
  const show = () => {
    const { currentWidget: notebook } = tracker;
    const isInFront = notebook && notebook === shell.currentWidget;
    const kernel = isInFront && notebook.sessionContext.session?.kernel;
    machine.show(kernel ? kernel.id : null, notebook?.title.label ?? '');
  };
  shell.currentChanged?.connect(show);
  tracker.currentChanged.connect(show);
  tracker.widgetAdded.connect((_, { sessionContext }) => {
    sessionContext.kernelChanged.connect(show);
    sessionContext.statusChanged.connect((_, status) => {
      if (status === 'idle') {
        machine.refresh();
      }
    });
  });
  show();
}

function addCommands(
  app: JupyterFrontEnd,
  palette: ICommandPalette | null,
  machine: Machine,
  actions: Actions,
  open: () => void
): void {
  const held = () => heldBy(machine.status, machine.kernel);
  const commands = {
    'reserve-gpu:reserve': {
      label: 'Reserve GPU',
      isEnabled: () => machine.offer !== null,
      execute: () => machine.kernel && attempt(actions.reserve(machine.kernel))
    },
    'reserve-gpu:release': {
      label: 'Release GPU',
      isEnabled: () => held() !== undefined,
      execute: () => {
        const reservation = held();
        return reservation && attempt(actions.release(reservation));
      }
    },
    'reserve-gpu:show': { label: 'Show GPUs', execute: open }
  };
  for (const [command, options] of Object.entries(commands)) {
    app.commands.addCommand(command, options);
    palette?.addItem({ command, category: 'GPU' });
  }
}

export default plugin;
