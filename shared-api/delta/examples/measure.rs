//! Measures the production and the application of one diff, for `e2e/setup/bench-deltas.sh`.
//!
//! ```text
//! measure make OLD.tar NEW.tar DIFF     ─▶ bytes, seconds, CPU seconds, peak MiB
//! measure apply DIRECTORY DIFF          ─▶ bytes, seconds, CPU seconds, peak MiB, SHA-256
//! ```
#![allow(clippy::print_stdout, reason = "it's a program")]

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Instant;

use prepull_api::enroll::hex;
use prepull_delta::make::{Resources, Root, TarFile, make_diff};
use prepull_delta::{ApplyLimits, OldRootFiles, apply_diff};
use ring::digest::{Context, SHA256};

type Measured = Result<(), Box<dyn std::error::Error>>;

fn main() -> Measured {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["make", old, new, diff] => measure_make(old, new, diff),
        ["apply", directory, diff] => measure_apply(directory, diff),
        _ => Err("measure make OLD.tar NEW.tar DIFF, or measure apply DIRECTORY DIFF".into()),
    }
}

fn measure_make(old: &str, new: &str, diff: &str) -> Measured {
    let begun = Instant::now();
    let (old, new) = (TarFile::new(File::open(old)?)?, TarFile::new(File::open(new)?)?);
    let mut out = File::options().read(true).write(true).create(true).truncate(true).open(diff)?;
    let threads = std::thread::available_parallelism()?.get();
    let settings = Resources { threads, memory: 1 << 30 };
    let made = make_diff(&Root::read(vec![&old])?, &new, &mut out, &settings, &mut |_| {})?;
    print!("{}", made.size);
    print_usage(begun)?;
    println!();
    for file in made.unshrunk.iter().take(5) {
        eprintln!("  {:>10} of {:>10}  {:?}  {}", file.sent, file.size, file.cause, file.path);
    }
    Ok(())
}

fn measure_apply(directory: &str, diff: &str) -> Measured {
    let begun = Instant::now();
    let mut out = Hashing(Context::new(&SHA256));
    let limits = ApplyLimits { output: u64::MAX };
    let applied = apply_diff(File::open(diff)?, &mut UnpackedImage(directory.into()), &mut out, &limits)?;
    print!("{}", applied.written);
    print_usage(begun)?;
    let digest = out.0.finish();
    println!(" {}", hex(digest.as_ref()));
    Ok(())
}

/// An unpacked image.
struct UnpackedImage(PathBuf);

impl OldRootFiles for UnpackedImage {
    type File = File;

    fn open(&mut self, path: &[u8]) -> io::Result<File> {
        File::open(self.0.join(std::ffi::OsStr::from_bytes(path)))
    }
}

struct Hashing(Context);

impl Write for Hashing {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        self.0.update(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Seconds since the beginning, seconds of CPU, and MiB at the peak.
fn print_usage(begun: Instant) -> Measured {
    // Linux counts in hundredths of a second here, on all architectures that we build for.
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(") ").ok_or("/proc/self/stat")?;
    let ticks: u32 = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u32>().ok()).sum();
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("VmHWM")?;
    let peak: u32 = peak.trim().trim_end_matches(" kB").parse()?;
    print!(
        " {:.2} {:.2} {:.1}",
        begun.elapsed().as_secs_f64(),
        f64::from(ticks) / 100.0,
        f64::from(peak) / 1024.0
    );
    Ok(())
}
