/** The tables of devices and waiters in the panel. */

import React from 'react';
import {
  type Group,
  type ILine,
  freeDevices,
  groups,
  limits,
  memoryOf,
  modelOf,
  ofHolder,
  ofWaiter,
  remarks,
  sharedModel,
  stateOf,
  uses
} from './details';
import { type IMachine } from './status';

/** Show a machine's devices, its queue, and the administrator's message and rules. */
export function MachineView({ machine }: { machine: IMachine }): JSX.Element {
  const { devices, message, problem, rules, time, waiting } = machine;
  const model = sharedModel(machine);
  const remarksBelow = [
    problem && `Reservations may be missing here: ${problem}`,
    rules && limits(rules),
    ...(rules?.problems ?? []).map(each => `Warning: ${each}`)
  ].filter(Boolean);
  return (
    <>
      {message && <p className="jp-ReserveGPU-message">{message}</p>}
      <p>
        {freeDevices(machine)}
        {model && <span className="jp-ReserveGPU-faint"> {model}</span>}
      </p>
      {groups(devices).map(group => (
        <Row
          key={group[0].label}
          group={group}
          now={time}
          showsModel={!model}
        />
      ))}
      {waiting.length > 0 && (
        <>
          <h3>Queue</h3>
          {waiting.map((ticket, index) => (
            <Line
              key={index}
              line={ofWaiter(ticket, time)}
              prefix={`${index + 1}. `}
            />
          ))}
        </>
      )}
      {remarksBelow.map((text, index) => (
        <p key={index}>{text}</p>
      ))}
    </>
  );
}

interface IRowProps {
  group: Group;
  now: number;
  showsModel: boolean;
}

/** Show a device, or several similar free ones. Its holders and remarks have a line each. */
function Row({ group, now, showsModel }: IRowProps): JSX.Element {
  const [device] = group;
  const { memory_total_mib: total, memory_used_mib: used } = device;
  const { utilisation_percent: load } = device;
  const numbers = [device, ...group.slice(1).slice(-1)].map(({ label }) =>
    label.replace(/^GPU/, '')
  );
  const state = stateOf(device);
  const isOwn = device.holders.some(holder => holder.is_own);
  const heat = [
    device.temperature_c !== null && `${device.temperature_c} °C`,
    device.power_w !== null && `${device.power_w.toFixed(0)} W`
  ].filter(Boolean);
  const lines = [
    ...device.holders.map(holder => ofHolder(device, holder, now)),
    ...uses(device)
  ];
  const texts = [...remarks(device), showsModel ? modelOf(device) : ''];
  return (
    <div className={`jp-ReserveGPU-row ${isOwn ? 'jp-mod-own' : ''}`}>
      <div className="jp-ReserveGPU-device">
        <span className="jp-ReserveGPU-number">{numbers.join('-')}</span>
        {total && used !== null ? (
          <meter min={0} max={1} low={0.5001} high={0.9} value={used / total} />
        ) : (
          <span className="jp-ReserveGPU-no-meter" />
        )}
        <span className="jp-ReserveGPU-memory">{memoryOf(device)}</span>
        <b data-state={state}>{state}</b>
        <span title={heat.join(' ')}>{load === null ? '' : `${load} %`}</span>
      </div>
      <div className="jp-ReserveGPU-lines">
        {lines.map((line, index) => (
          <Line key={index} line={line} />
        ))}
        {texts.filter(Boolean).map((text, index) => (
          <div key={index} className="jp-ReserveGPU-remark" title={text}>
            {text}
          </div>
        ))}
      </div>
    </div>
  );
}

/** Show a process. Text that does not fit ends with an ellipsis, and a tooltip shows all of it. */
function Line({
  line: { title, details },
  prefix = ''
}: {
  line: ILine;
  prefix?: string;
}): JSX.Element {
  return (
    <div className="jp-ReserveGPU-line">
      <span title={prefix + title}>
        {prefix}
        <bdi className="jp-ReserveGPU-name">{title}</bdi>
      </span>
      <span
        className="jp-ReserveGPU-details"
        title={details.map(({ text }) => text).join(' · ')}
      >
        {details.map(({ text, isMark }, index) => (
          <React.Fragment key={index}>
            {index > 0 && ' · '}
            {isMark ? (
              <b>
                <bdi>{text}</bdi>
              </b>
            ) : (
              <bdi>{text}</bdi>
            )}
          </React.Fragment>
        ))}
      </span>
    </div>
  );
}
