//! A disk with a real file system, whose power can be cut.
//!
//! SIGKILL leaves the page cache, and with it everything that was written, so that a killed process cannot show what a
//! power cut loses. Here the file system itself is shut down, without writing its journal first: what it had not written
//! by then is gone. The disk is then copied, as another process may still hold the old one, and the copy goes on.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::parts;
use crate::place::unmount_below;

/// Enough for some images and the smallest xfs there is. Only what is written takes room.
pub const SIZE: u64 = 512 * 1024 * 1024;
/// Calls `GOINGDOWN` of the file system of a directory, with the flag that its journal is not written. Such a call is
/// unsafe code in Rust, and no program of Debian's base makes it.
const SHUT_DOWN: &str = r#"open(my $dir, "<", $ARGV[0]) or die "$ARGV[0]: $!\n";
my $no_log_flush = pack("L", 2);
ioctl($dir, 0x8004587D, $no_log_flush) or die "GOINGDOWN: $!\n";"#;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// ext4.
    Ext4,
    /// xfs, whose tools not every machine has.
    Xfs,
}

impl Format {
    /// Those that this machine can make.
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
            // What is on the disk is what was flushed, and not what five seconds have brought there.
            Self::Ext4 => "loop,commit=600",
            // The copy has the name of the disk that it was made of.
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
    /// How often its power was cut.
    cuts: u32,
}

impl Disk {
    /// Makes a disk of this many bytes in the directory, and mounts it over `root`.
    pub async fn mount(format: Format, size: u64, dir: &Path, root: &Path) -> Result<Self> {
        let disk = Self { format, file: dir.join("disk-0"), root: root.to_owned(), cuts: 0 };
        std::fs::File::create_new(&disk.file)?.set_len(size)?;
        let [maker, quiet] = format.maker();
        let mut command = Command::new(maker);
        command.arg(quiet).arg(&disk.file);
        parts::output(command).await?;
        disk.attach().await?;
        Ok(disk)
    }

    async fn attach(&self) -> Result<()> {
        let mut command = Command::new("mount");
        command.args(["-o", self.format.options()]).arg(&self.file).arg(&self.root);
        parts::output(command).await.map(drop)
    }

    /// Cuts the power: from now on nothing is written, and what was not written is lost.
    pub fn cut_power(&self) -> Result<()> {
        let shut = Command::new("perl").args(["-e", SHUT_DOWN]).arg(&self.root).output();
        let shut = shut.context("cannot start perl")?;
        let said = String::from_utf8_lossy(&shut.stderr);
        ensure!(shut.status.success(), "{} cannot be shut down: {said}", self.root.display());
        Ok(())
    }

    /// Mounts what the power cut has left. The processes that used the disk must have ended.
    pub(crate) async fn power_on(&mut self) -> Result<()> {
        unmount_below(&self.root);
        self.cuts += 1;
        let copy = self.file.with_file_name(format!("disk-{}", self.cuts));
        let mut command = Command::new("cp");
        command.arg("--sparse=always").args([&self.file, &copy]);
        parts::output(command).await?;
        std::fs::remove_file(&self.file)?;
        self.file = copy;
        self.attach().await
    }
}
