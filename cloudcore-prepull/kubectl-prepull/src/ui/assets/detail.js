// One node of a job: its images, tries, steps and events.

import { bytes, make, time } from "./dom.js";
import { linkTo } from "./place.js";

/** The children of its section, below its name and state. */
export function detailOf({ job, name, record, events: all }) {
  const events = all.filter((event) => event.message?.split(/[\s,:;]+/).includes(name));
  const images = (record.imageStatus ?? []).map((image) => {
    const facts = [
      ["State", { True: "there", False: "failed", Unknown: "not there yet" }[image.status] ?? image.status],
      ["Bytes", image.bytes ? `${bytes(image.bytes.done)} of ${bytes(image.bytes.total)}` : null],
      ["Tries", image.attempts ? String(image.attempts) : null],
      ["Pulled as", image.pulledImage && image.pulledImage !== image.image ? image.pulledImage : null],
      ["Digest", image.digest],
      ["By", image.pulledBy],
      ["Signed by", image.signedBy],
      ["Cause", image.code],
      ["Reason", image.reason],
      ["Kubelet", image.kubeletRecordReason],
    ].filter(([, value]) => value);
    return [make("p", { class: "mono" }, image.image), make("dl", {}, facts.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, value)]))];
  });
  const removed = (record.removal?.images ?? []).map((image) => {
    const facts = [
      ["State", { Removed: "removed", Removable: "would be removed", Kept: "kept", Failed: "can't be removed" }[image.outcome] ?? image.outcome],
      ["Freed", image.bytes ? bytes(image.bytes) : null],
      ["Cause", image.code],
      ["Reason", image.reason],
    ].filter(([, value]) => value);
    return [make("p", { class: "mono" }, image.image), make("dl", {}, facts.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, value)]))];
  });
  const unlisted = record.removal ? record.removal.removed + record.removal.kept - removed.length : 0;
  const steps = (record.actionFlow ?? []).map((step) => make("li", {}, `${new Date(step.time).toLocaleTimeString()} ${step.action}: ${step.status}${step.reason?.trim() ? `, ${step.reason}` : ""}`));
  return [
    make("p", { class: "dim" }, `Attempt ${record.attempt ?? 0}${record.startTime ? `, began ${time(record.startTime)}` : ""}`),
    ...images.flat(),
    ...removed.flat(),
    ...(unlisted > 0 ? [make("p", { class: "dim" }, `${unlisted} more aren't listed.`)] : []),
    ...(steps.length ? [make("h4", {}, "Steps"), make("ul", {}, steps)] : []),
    ...(events.length ? [make("h4", {}, "Events"), make("ul", {}, events.map((event) => make("li", {}, `${new Date(event.time).toLocaleTimeString()} ${event.reason}: ${event.message}`)))] : []),
    make("p", { class: "dim" }, make("a", { href: linkTo("edges", name) }, "This edge and its other jobs"), ". More: ", make("code", {}, `kubectl prepull why ${name} ${job}`)),
  ];
}
