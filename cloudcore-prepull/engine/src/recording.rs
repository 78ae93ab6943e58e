//! Recordings of an engine's inputs: one JSON object per line, and a player for them.
//!
//! An engine has no clock and no randomness, so the same inputs at the same times lead to the same actions, though
//! their order within a flush may differ. A recording made on a cluster in trouble (`cloudcore-prepull run --record
//! FILE`) is therefore a test: see `tests/replay.rs`. It holds no Secret and no key, since no engine ever sees one; it
//! does hold what people wrote into their jobs. Of the actions it keeps how many there were of each kind, so that a
//! replay can say where it parts from what was recorded.

use std::collections::BTreeMap;
use std::io::BufRead;

use jiff::Timestamp;
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::selector::Selector;
use serde::{Deserialize, Serialize};

use crate::engine::{Action, Engine, Input};
use crate::prepull::controller::{self, Content};
use crate::sites::SiteSettings;

/// How many actions there were of each [kind](Action::kind).
pub type ActionCounts = BTreeMap<String, usize>;

/// One line. `I` is [`Input`] where a recording is read, and `&Input` where it is written.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RecordingEntry<I> {
    /// A leader began its work, with an engine that knows nothing.
    #[serde(rename_all = "camelCase")]
    Begin {
        /// The version of cloudcore-prepull.
        version: String,
        /// The nodes that get a NodeImage. None: Kruise's API is not served.
        kruise_node_selector: Option<String>,
        /// How nodes are grouped into sites.
        #[serde(default)]
        sites: SiteSettings,
    },
    /// The engine took this in.
    Input {
        /// The time that the engine was given, in RFC 3339.
        at: String,
        /// What it took in.
        input: I,
    },
    /// The engine was flushed.
    Flush {
        /// The time that the engine was given, in RFC 3339.
        at: String,
        /// What it answered.
        actions: ActionCounts,
    },
}

impl RecordingEntry<&Input> {
    /// The line, with its line feed.
    ///
    /// # Errors
    /// An input that is not meant to be recorded: one that the halves of Kruise's engine tell each other.
    pub fn to_line(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        Ok(line)
    }
}

/// The number of actions of each kind.
pub fn count_actions(actions: &[Action]) -> ActionCounts {
    let mut counts = ActionCounts::new();
    for action in actions {
        *counts.entry(action.kind().to_owned()).or_default() += 1;
    }
    counts
}

/// Why a recording cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read any further.
    #[error("line {line} cannot be read")]
    Read {
        /// Counted from one.
        line: usize,
        /// Why.
        source: std::io::Error,
    },
    /// A line doesn't belong to a recording, or comes from a version with other inputs. The last line of a killed
    /// process may be cut, and is skipped.
    #[error("line {line} is not an entry of a recording that this version can play (recorded by {recorder}, played by {})", env!("CARGO_PKG_VERSION"))]
    Parse {
        /// Counted from one.
        line: usize,
        /// The version that recorded it, as far as the file has said so.
        recorder: String,
        /// Why.
        source: serde_json::Error,
    },
    /// Where a leader began is not in the file, so that nothing in it can be played.
    #[error("line {line}: the recording does not start where a leader began: its beginning is missing")]
    NoBeginning {
        /// Counted from one.
        line: usize,
    },
    /// The selector or a time cannot be parsed.
    #[error("line {line}: {problem}")]
    Value {
        /// Counted from one.
        line: usize,
        /// What is wrong, and with what.
        problem: String,
    },
}

/// What a recording led to.
#[derive(Debug, Default)]
pub struct Replay {
    /// Leaders that began.
    pub leaders: usize,
    /// Inputs that were taken in.
    pub inputs: usize,
    /// The last status that was to be written of each ImagePrePullJob, by the job's name.
    pub statuses: BTreeMap<String, ImagePrePullJobStatus>,
    /// The actions of each kind, over all.
    pub actions: ActionCounts,
    /// Where other actions came out than were recorded, in words. Empty, unless the engine has changed since.
    pub differences: Vec<String>,
}

/// Plays a recording on a new engine, and shows each action to `watch`.
///
/// # Errors
/// See [`ReplayError`].
pub fn replay(
    recording: impl BufRead,
    mut watch: impl FnMut(Timestamp, &Action),
) -> Result<Replay, ReplayError> {
    let (mut engine, mut replay) = (Engine::default(), Replay::default());
    let (mut cut, mut recorder) = (None, "an unknown version".to_owned());
    // Split by bytes: a kill may cut a line inside of a character.
    for (text, line) in recording.split(b'\n').zip(1..) {
        let text = text.map_err(|source| ReplayError::Read { line, source })?;
        if text.is_empty() {
            continue;
        }
        let entry: RecordingEntry<Input> = match serde_json::from_slice(&text) {
            Ok(entry) => entry,
            Err(source) => match cut.replace(ReplayError::Parse { line, recorder: recorder.clone(), source })
            {
                // One line may be cut, and not a run of them.
                Some(first) => return Err(first),
                None => continue,
            },
        };
        // A process that was killed leaves half a line: the last one, or the one before the next process begins.
        if let Some(error) = cut.take()
            && !matches!(entry, RecordingEntry::Begin { .. })
        {
            return Err(error);
        }
        if replay.leaders == 0 && !matches!(entry, RecordingEntry::Begin { .. }) {
            return Err(ReplayError::NoBeginning { line });
        }
        match entry {
            RecordingEntry::Begin { version, kruise_node_selector, sites } => {
                replay.leaders += 1;
                recorder = version;
                engine = match kruise_node_selector {
                    Some(selector) => Engine::with_kruise(
                        Selector::parse(&selector)
                            .map_err(|error| ReplayError::Value { line, problem: error.to_string() })?,
                    ),
                    None => Engine::default(),
                }
                .with_sites(sites);
            }
            RecordingEntry::Input { at, input } => {
                replay.inputs += 1;
                engine.handle(input, parse_time(&at, line)?);
            }
            RecordingEntry::Flush { at, actions: recorded } => {
                let now = parse_time(&at, line)?;
                let actions = engine.flush(now);
                let counts = count_actions(&actions);
                if counts != recorded {
                    replay
                        .differences
                        .push(format!("line {line}, {at}: recorded {recorded:?}, replayed {counts:?}"));
                }
                for (kind, count) in counts {
                    *replay.actions.entry(kind).or_default() += count;
                }
                for action in actions {
                    watch(now, &action);
                    replay.keep_status(action);
                }
            }
        }
    }
    match cut {
        // It is no recording at all. A file without a line is one of a process that was killed at its start.
        Some(error) if replay.leaders == 0 => Err(error),
        _ => Ok(replay),
    }
}

impl Replay {
    fn keep_status(&mut self, action: Action) {
        if let Action::Prepull(controller::Action::Write { name, content: Content::Status(status), .. }) =
            action
        {
            self.statuses.insert(name, *status);
        }
    }
}

fn parse_time(at: &str, line: usize) -> Result<Timestamp, ReplayError> {
    at.parse().map_err(|error| ReplayError::Value { line, problem: format!("{at:?} is no time: {error}") })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn lines(entries: &[RecordingEntry<&Input>]) -> Vec<u8> {
        entries.iter().flat_map(|entry| entry.to_line().unwrap()).collect()
    }

    #[test]
    fn a_recording_may_span_several_leaders() {
        let at = "2026-01-01T00:00:00Z".to_owned();
        let begin = || RecordingEntry::Begin {
            version: "made up".to_owned(),
            kruise_node_selector: None,
            sites: SiteSettings::default(),
        };
        let input = || RecordingEntry::Input { at: at.clone(), input: &Input::Tick };
        let flush = || RecordingEntry::Flush { at: at.clone(), actions: ActionCounts::new() };
        let whole = lines(&[begin(), input(), flush(), begin(), input(), input()]);
        let played = replay(&whole[..], |_, _| {}).unwrap();
        assert_eq!((played.leaders, played.inputs, played.differences), (2, 3, vec![]));
        for headless in [lines(&[input(), begin()]), lines(&[flush(), begin()])] {
            let error = replay(&headless[..], |_, _| {}).unwrap_err();
            assert!(matches!(error, ReplayError::NoBeginning { line: 1 }), "{error}");
        }
    }
}
