//! The settings in force: the node's own, and the cloud's within their bounds.
//!
//! ```text
//!  CloudMessage::Settings ─▶ CloudSettings::take ─▶ InForce ─▶ buckets, room, clock
//!                                    └─▶ settings.json ─▶ Configured
//! ```
//! The node's own settings are the upper bound: of each, the stricter is in force. What the cloud has set stays in force
//! without a session and after a restart, until the cloud sets something else.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use indicatif::HumanBytes;
use prepull_api::settings::NodeSettings;
use prepull_window::write_window;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::cloud::identity::replace_file;
use crate::images::fetch::RoomRules;
use crate::one_question::OneQuestion;
use crate::units::Percent;

/// The file with the cloud's settings, in the state directory.
const FILE: &str = "settings.json";
/// Another round of a job comes within a day or never.
const DEFAULT_KEEP_UNFINISHED: Duration = Duration::from_secs(24 * 3600);
/// Interval of trying to write it: a full disk stays full for a while.
const STORE_RETRY: Duration = Duration::from_secs(60);

/// What the node's own settings say of those that the cloud may set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Own {
    /// Bytes a second that all pulls together may download.
    pub(crate) max_download_rate: Option<NonZeroU64>,
    /// Bytes a second that all neighbours together may read.
    pub(crate) peer_max_upload_rate: Option<NonZeroU64>,
    /// Limits for the free space, with the defaults.
    pub(crate) room: RoomRules,
    /// `--make-room`, if it's given.
    pub(crate) make_room: Option<bool>,
    /// `--keep-unfinished`, if it's given.
    pub(crate) keep_unfinished: Option<Duration>,
}

/// What holds now. The windows are part of [`crate::tasks::agent::NodeWindows`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InForce {
    /// Bytes a second that all pulls together may download.
    pub(crate) max_download_rate: Option<NonZeroU64>,
    /// Bytes a second that all neighbours together may read.
    pub(crate) peer_max_upload_rate: Option<NonZeroU64>,
    /// Limits for the free space.
    pub(crate) room: RoomRules,
    /// How long to keep what unfinished pulls have fetched, once no task wants it.
    pub(crate) keep_unfinished: Duration,
}

impl Own {
    /// The stricter of each.
    fn combine_with(&self, cloud: &NodeSettings) -> InForce {
        let threshold = cloud.image_gc_high_threshold.map_or(self.room.gc_high_threshold, |percent| {
            Percent(u32::from(percent).min(self.room.gc_high_threshold.0))
        });
        let make_room = self.make_room != Some(false) && cloud.make_room.unwrap_or(self.room.make_room);
        InForce {
            max_download_rate: lower(self.max_download_rate, cloud.max_download_rate),
            peer_max_upload_rate: lower(self.peer_max_upload_rate, cloud.peer_max_upload_rate),
            room: RoomRules { gc_high_threshold: threshold, make_room, ..self.room },
            keep_unfinished: lower(self.keep_unfinished, cloud.keep_unfinished)
                .unwrap_or(DEFAULT_KEEP_UNFINISHED),
        }
    }
}

#[cfg(test)]
impl Own {
    /// No limits, and the defaults.
    pub(crate) fn unlimited() -> Self {
        let room = crate::images::fetch::FetchSettings::default().room;
        Self {
            max_download_rate: None,
            peer_max_upload_rate: None,
            room,
            make_room: None,
            keep_unfinished: None,
        }
    }
}

/// The lower of both.
fn lower<T: Ord>(own: Option<T>, cloud: Option<T>) -> Option<T> {
    own.into_iter().chain(cloud).min()
}

/// The cloud's settings for this node.
#[derive(Debug)]
pub(crate) struct CloudSettings {
    path: PathBuf,
    own: Own,
    cloud: watch::Sender<NodeSettings>,
    /// The last settings to come must be the last that are written, also on a disk that hangs.
    writing: OneQuestion,
}

impl CloudSettings {
    /// With what the cloud has set before. A file that can't be read counts as none: the cloud compares in each session.
    pub(crate) fn load(state_dir: &Path, own: Own) -> Self {
        let path = state_dir.join(FILE);
        let read = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(NodeSettings::default()),
            Err(error) => Err(error),
        };
        let cloud = read.unwrap_or_else(|error| {
            tracing::warn!(file = %path.display(), %error, "the cloud's settings for this node are not readable; it sends them again");
            NodeSettings::default()
        });
        Self { path, own, cloud: watch::Sender::new(cloud), writing: OneQuestion::default() }
    }

    /// What the cloud has set last.
    pub(crate) fn of_cloud(&self) -> NodeSettings {
        self.cloud.borrow().clone()
    }

    /// What's in force now.
    pub(crate) fn in_force(&self) -> InForce {
        self.own.combine_with(&self.cloud.borrow())
    }

    /// Applies what's in force now, and what follows, in an endless loop.
    pub(crate) async fn follow(&self, apply: impl Fn(&InForce)) -> Infallible {
        let mut cloud = self.cloud.subscribe();
        loop {
            apply(&self.own.combine_with(&cloud.borrow_and_update()));
            // The sender is borrowed here, so this can't fail.
            let _ = cloud.changed().await;
        }
    }

    /// Puts settings of the cloud in force.
    pub(crate) fn put_in_force(&self, cloud: NodeSettings) {
        self.cloud.send_replace(cloud);
    }

    /// Writes what the cloud has set last, so that it survives a power cut, and returns it. Tries until that succeeds.
    pub(crate) async fn persist_latest(self: Arc<Self>) -> NodeSettings {
        loop {
            let settings = self.clone();
            match self.writing.ask(move || settings.store()).await.map_err(io::Error::from).flatten() {
                Ok(stored) => return stored,
                Err(error) => {
                    tracing::warn!(%error, "the cloud's settings can't be written: they are in force until the next restart");
                }
            }
            sleep(STORE_RETRY).await;
        }
    }

    fn store(&self) -> io::Result<NodeSettings> {
        let cloud = self.of_cloud();
        replace_file(&self.path, &serde_json::to_vec(&cloud)?, 0o600)?;
        Ok(cloud)
    }
}

/// Settings of the cloud in words, for a log and for people at the box.
pub(crate) fn describe_settings(settings: &NodeSettings) -> String {
    let NodeSettings {
        max_download_rate,
        peer_max_upload_rate,
        windows,
        image_gc_high_threshold,
        make_room,
        keep_unfinished,
    } = settings;
    let rate = |what: &str, rate: &Option<NonZeroU64>| {
        rate.map(|rate| format!("{what} {}/s", HumanBytes(rate.get())))
    };
    let windows: Vec<_> = windows.iter().map(write_window).collect();
    let parts = [
        rate("at most", max_download_rate),
        rate("uploads at most", peer_max_upload_rate),
        (!windows.is_empty()).then(|| format!("windows {}", windows.join("; "))),
        image_gc_high_threshold.map(|percent| format!("disk at most {percent}% full")),
        make_room.map(|makes| if makes { "makes room" } else { "makes no room" }.to_owned()),
        keep_unfinished
            .map(|time| format!("keeps unfinished pulls for {}", humantime::format_duration(time))),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::{Mutex, mpsc};

    use tokio::task::{spawn_blocking, yield_now};
    use tokio::time::timeout;

    use super::*;

    fn own(rate: Option<u64>, make_room: Option<bool>) -> Own {
        let own = Own::unlimited();
        let room = RoomRules { make_room: make_room.unwrap_or(false), ..own.room };
        Own { max_download_rate: rate.and_then(NonZeroU64::new), room, make_room, ..own }
    }

    #[test]
    fn the_stricter_is_in_force() {
        let cloud = |rate: u64, threshold| NodeSettings {
            max_download_rate: NonZeroU64::new(rate),
            image_gc_high_threshold: threshold,
            ..NodeSettings::default()
        };
        for (rate, cloud, expected) in [
            (None, cloud(0, None), (None, 85)),
            (None, cloud(5000, Some(70)), (Some(5000), 70)),
            (Some(3000), cloud(5000, Some(95)), (Some(3000), 85)),
            (Some(3000), cloud(2000, None), (Some(2000), 85)),
        ] {
            let in_force = own(rate, None).combine_with(&cloud);
            let rate = in_force.max_download_rate.map(NonZeroU64::get);
            assert_eq!((rate, in_force.room.gc_high_threshold.0), expected, "{cloud:?}");
        }
    }

    #[test]
    fn the_shorter_time_is_in_force() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        for (own_time, cloud, expected) in [
            (None, None, 24),
            (None, Some(72), 72),
            (Some(6), None, 6),
            (Some(6), Some(72), 6),
            (Some(6), Some(1), 1),
        ] {
            let own = Own { keep_unfinished: own_time.map(hours), ..Own::unlimited() };
            let cloud = NodeSettings { keep_unfinished: cloud.map(hours), ..NodeSettings::default() };
            assert_eq!(
                own.combine_with(&cloud).keep_unfinished,
                hours(expected),
                "own {own_time:?}, cloud {cloud:?}"
            );
        }
    }

    #[test]
    fn a_node_that_refuses_makes_no_room() {
        let makes_room = |own_rule, make_room| {
            own(None, own_rule)
                .combine_with(&NodeSettings { make_room, ..NodeSettings::default() })
                .room
                .make_room
        };
        for (own, cloud, expected) in [
            (None, None, false),
            (None, Some(true), true),
            (Some(true), None, true),
            (Some(true), Some(false), false),
            (Some(false), Some(true), false),
        ] {
            assert_eq!(makes_room(own, cloud), expected, "own {own:?}, cloud {cloud:?}");
        }
    }

    #[tokio::test]
    async fn settings_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let load = || Arc::new(CloudSettings::load(dir.path(), own(None, None)));
        let set = NodeSettings { max_download_rate: NonZeroU64::new(4096), ..NodeSettings::default() };
        let before = load();
        before.put_in_force(set.clone());
        assert_eq!(before.persist_latest().await, set);
        assert_eq!(load().of_cloud(), set);
        fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(load().of_cloud().is_empty());
    }

    #[test]
    fn abandoned_writes_keep_one_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(2)
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let settings = Arc::new(CloudSettings::load(dir.path(), own(None, None)));
        runtime.block_on(async {
            let (answer, answers) = mpsc::channel::<()>();
            let first = settings.clone();
            let first = tokio::spawn(async move { first.writing.ask(move || answers.recv().is_ok()).await });
            yield_now().await;
            for _ in 0..4 {
                let write = settings.clone().persist_latest();
                assert!(timeout(Duration::from_millis(20), write).await.is_err());
            }
            timeout(Duration::from_secs(10), spawn_blocking(|| ())).await.unwrap().unwrap();
            drop(answer);
            first.await.unwrap().unwrap();
            assert!(settings.persist_latest().await.is_empty());
        });
    }

    #[tokio::test(start_paused = true)]
    async fn followers_see_each_change() {
        let settings = CloudSettings::load(Path::new("/nonexistent"), own(Some(3000), None));
        let seen = Mutex::new(Vec::new());
        let follow =
            settings.follow(|now| seen.lock().unwrap().push(now.max_download_rate.map(NonZeroU64::get)));
        let change = async {
            for rate in [5000, 2000] {
                sleep(Duration::from_secs(1)).await;
                let max_download_rate = NonZeroU64::new(rate);
                settings.put_in_force(NodeSettings { max_download_rate, ..NodeSettings::default() });
            }
            sleep(Duration::from_secs(1)).await;
        };
        tokio::select! {
            never = follow => match never {},
            () = change => {}
        }
        assert_eq!(*seen.lock().unwrap(), [Some(3000), Some(3000), Some(2000)]);
    }
}
