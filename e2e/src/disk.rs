//! A disk with a real file system and a power switch.
//!
//! SIGKILL doesn't lose the page cache, and so none of the written data: a killed process can't show the effect of a
//! power cut. Here we shut down the file system itself, without writing its journal first, so all unwritten data is
//! lost. Then we continue with a copy of the disk, as another process may still hold the old one.
//!
//! That shows the loss at the moment of the cut. [`recorder`] shows every other moment: it records each write to a
//! disk, so that we can mount the disk's state after any of them.

mod recorder;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use self::recorder::Recorder;
use crate::chance::Chance;
use crate::parts;
use crate::place::unmount_below;
pub use recorder::Recording;

/// Enough for some images and the smallest possible xfs. It only takes the space of the written data.
pub const SIZE: u64 = 512 * 1024 * 1024;
/// Calls `GOINGDOWN` for the file system of a directory, with the flag that omits writing its journal. Such a call is
/// unsafe code in Rust, and no program of Debian's base makes it.
const SHUT_DOWN: &str = r#"open(my $dir, "<", $ARGV[0]) or die "$ARGV[0]: $!\n";
my $no_log_flush = pack("L", 2);
ioctl($dir, 0x8004587D, $no_log_flush) or die "GOINGDOWN: $!\n";"#;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// ext4.
    Ext4,
    /// xfs. Its tools aren't on every machine.
    Xfs,
}

impl Format {
    /// The formats that this machine can create.
    pub fn all() -> Vec<Self> {
        let can = |format: &Self| {
            let made = Command::new(format.maker()[0]).arg("-V").output();
            *format == Self::Ext4 || made.is_ok_and(|made| made.status.success())
        };
        [Self::Ext4, Self::Xfs].into_iter().filter(can).collect()
    }

    fn maker(self) -> [&'static str; 2] {
        match self {
            Self::Ext4 => ["mkfs.ext4", "-q"],
            Self::Xfs => ["mkfs.xfs", "-q"],
        }
    }

    fn options(self) -> &'static str {
        match self {
            // A long commit interval: only flushed data gets to the disk.
            Self::Ext4 => "loop,commit=600",
            // The copy has the same UUID as its original.
            Self::Xfs => "loop,nouuid",
        }
    }
}

/// A disk in a file, mounted over a directory. The place of the test unmounts it, which frees its loop device too.
#[derive(Debug)]
pub struct Disk {
    format: Format,
    file: PathBuf,
    root: PathBuf,
    /// Number of power cuts.
    cuts: u32,
    /// Records the writes.
    recorder: Option<Recorder>,
}

impl Disk {
    /// Makes a disk of this many bytes in the directory, and mounts it over `root`.
    pub async fn mount(format: Format, size: u64, dir: &Path, root: &Path) -> Result<Self> {
        let disk = Self::make(format, size, dir, root).await?;
        disk.attach(&disk.file).await?;
        Ok(disk)
    }

    /// The same, with a recording of all writes from now on.
    pub async fn record(format: Format, dir: &Path, root: &Path) -> Result<Self> {
        let mut disk = Self::make(format, SIZE, dir, root).await?;
        let recorder = disk.recorder.insert(Recorder::start(&disk.file)?);
        let shown = recorder.file();
        disk.attach(&shown).await?;
        Ok(disk)
    }

    async fn make(format: Format, size: u64, dir: &Path, root: &Path) -> Result<Self> {
        let file = dir.join("disk-0");
        std::fs::File::create_new(&file)?.set_len(size)?;
        let [maker, quiet] = format.maker();
        let mut command = Command::new(maker);
        command.arg(quiet).arg(&file);
        parts::run_command(command).await?;
        Ok(Self { format, file, root: root.to_owned(), cuts: 0, recorder: None })
    }

    async fn attach(&self, file: &Path) -> Result<()> {
        let mut command = Command::new("mount");
        command.args(["-o", self.format.options()]).arg(file).arg(&self.root);
        parts::run_command(command).await.map(drop)
    }

    /// Where it's mounted.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Number of writes and flushes that were recorded so far.
    pub fn recorded(&self) -> usize {
        self.recorder.as_ref().map_or(0, Recorder::so_far)
    }

    /// Unmounts the disk, and returns the recording. The processes that used the disk must have ended.
    pub fn end_recording(&mut self) -> Result<Recording> {
        unmount_below(&self.root);
        self.recorder.take().context("nothing is recorded")?.end()
    }

    /// Mounts the disk in its state after a power cut before this event of a recording.
    pub async fn insert(&mut self, recording: &Recording, cut: usize, chance: &mut Chance) -> Result<()> {
        unmount_below(&self.root);
        let copy = self.next_file();
        recording.replay(cut, chance, &copy)?;
        self.replace(copy).await
    }

    fn next_file(&mut self) -> PathBuf {
        self.cuts += 1;
        self.file.with_file_name(format!("disk-{}", self.cuts))
    }

    async fn replace(&mut self, file: PathBuf) -> Result<()> {
        std::fs::remove_file(&self.file)?;
        self.file = file;
        self.attach(&self.file).await
    }

    /// Cuts the power: from now on nothing is written, and unwritten data is lost.
    pub fn cut_power(&self) -> Result<()> {
        let shut = Command::new("perl").args(["-e", SHUT_DOWN]).arg(&self.root).output();
        let shut = shut.context("cannot start perl")?;
        let said = String::from_utf8_lossy(&shut.stderr);
        ensure!(shut.status.success(), "{} cannot be shut down: {said}", self.root.display());
        Ok(())
    }

    /// Mounts the state after the power cut. The processes that used the disk must have ended.
    pub async fn power_on(&mut self) -> Result<()> {
        unmount_below(&self.root);
        let copy = self.next_file();
        let mut command = Command::new("cp");
        command.arg("--sparse=always").args([&self.file, &copy]);
        parts::run_command(command).await?;
        self.replace(copy).await
    }
}
