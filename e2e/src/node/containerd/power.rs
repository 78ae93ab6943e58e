//! A containerd on a disk with a power switch.

use anyhow::{Context, Result};
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{PrepareSnapshotRequest, RemoveSnapshotRequest};

use super::config::Habit;
use super::unpacked::in_namespace;
use super::{Containerd, Data};
use crate::chance::Chance;
use crate::disk::{Disk, Format, Recording, SIZE};

impl Containerd {
    /// Starts a containerd with its data on a disk with a power switch.
    pub async fn start_on_disk(name: &str, format: Format) -> Result<Self> {
        Self::start_as(name, Data::Disk(format, SIZE), Habit::None, None).await
    }

    /// Starts a containerd with its data on a disk that records its writes. Its databases already exist on the disk: a
    /// cut while containerd creates that of its snapshotter, at its very first unpacking, was seen to leave a file of
    /// zeros that breaks every pull.
    pub async fn start_recorded(name: &str, format: Format) -> Result<Self> {
        let containerd = Self::start_as(name, Data::Recorded(format), Habit::None, None).await?;
        let mut snapshots = SnapshotsClient::new(containerd.channel().await?);
        let (snapshotter, key) = ("overlayfs".to_owned(), "prepull-e2e-first".to_owned());
        let prepare = PrepareSnapshotRequest {
            snapshotter: snapshotter.clone(),
            key: key.clone(),
            ..PrepareSnapshotRequest::default()
        };
        snapshots.prepare(in_namespace(prepare)?).await?;
        match snapshots.remove(in_namespace(RemoveSnapshotRequest { snapshotter, key })?).await {
            // Nothing holds it, and containerd's collector, which runs after the start, was first.
            Err(status) if status.code() == tonic::Code::NotFound => {}
            removed => drop(removed?),
        }
        rustix::fs::syncfs(std::fs::File::open(containerd.root())?)?;
        Ok(containerd)
    }

    fn disk(&mut self) -> Result<&mut Disk> {
        self.disk.as_mut().context("this containerd is on no disk")
    }

    /// Cuts the power of the disk, and kills containerd.
    pub fn cut_power(&mut self) -> Result<()> {
        self.disk()?.cut_power()?;
        self.kill9()
    }

    /// Restarts containerd with the state of the disk at the power cut.
    pub async fn power_on(&mut self) -> Result<()> {
        self.disk()?.power_on().await?;
        std::fs::remove_dir_all(self.dir.join("state"))?;
        self.restart().await
    }

    /// Number of writes and flushes that were recorded so far.
    pub fn recorded(&mut self) -> Result<usize> {
        Ok(self.disk()?.recorded())
    }

    /// Kills containerd, and returns the recording of its disk.
    pub fn end_recording(&mut self) -> Result<Recording> {
        self.kill9()?;
        self.disk()?.end_recording()
    }

    /// Starts containerd with the state of the disk after a power cut before this event of a recording.
    pub async fn start_after_cut(
        &mut self,
        recording: &Recording,
        cut: usize,
        chance: &mut Chance,
    ) -> Result<()> {
        self.kill9()?;
        self.disk()?.insert(recording, cut, chance).await?;
        std::fs::remove_dir_all(self.dir.join("state"))?;
        self.restart().await
    }
}
