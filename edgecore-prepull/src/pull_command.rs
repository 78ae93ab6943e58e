//! `edgecore-prepull pull`: the agent's executor without the cloud.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use prepull_api::credentials::RegistryConfig;
use prepull_api::image::{NormalizedReference, Reference};
use prepull_api::task::{
    Bytes, CheckItem, ImageOutcome, ImagePhase, ImageProgress, ImageResult, ImageTask, JobUid, PullPolicy,
    Task, TaskId,
};
use prepull_api::wire::Key;
use std::sync::Arc;
use tokio::sync::mpsc;

use crate::agent::{Event, Terms, Work};
use crate::args::PullArgs;
use crate::config::Limits;
use crate::executor::Executor;
use crate::puller::cri::CriPuller;
use crate::runtime::{endpoint, termination};

/// A person is waiting, and can press Ctrl-C. A day is for the one who went home.
const DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// Pulls, shows how far it is, and says how each image fared.
pub async fn run(args: PullArgs) -> anyhow::Result<ExitCode> {
    let PullArgs { images, runtime_endpoint, docker_config, retries, parallel_pulls } = args;
    let config = docker_config
        .map(|path| {
            let bytes =
                std::fs::read(&path).with_context(|| format!("read --docker-config {}", path.display()))?;
            RegistryConfig::from_docker_config(&bytes)
                .with_context(|| format!("--docker-config {} cannot be used", path.display()))
        })
        .transpose()?;
    let mut tasks = Vec::with_capacity(images.len());
    let mut keys = Vec::with_capacity(images.len());
    for image in images {
        let reference =
            Reference::parse(&image).with_context(|| format!("{image:?} is no image reference"))?;
        let normalized = reference.normalized();
        keys.push(Arc::new(key(config.as_ref(), &normalized)));
        tasks.push(ImageTask {
            image,
            reference: normalized.to_string(),
            // What is asked for by hand is wanted as it is now.
            policy: PullPolicy::Always,
            retries,
            key: 0,
        });
    }
    let executor = Executor::new(
        CriPuller::new(endpoint(runtime_endpoint.as_deref())?),
        Limits::default(),
        parallel_pulls,
    );
    let task = Task {
        id: TaskId { job: JobUid("pull".to_owned()), attempt: 1 },
        title: "pull".to_owned(),
        checks: vec![CheckItem::Disk],
        images: tasks,
    };
    let mut display = Display::new(&task.images);
    let done = vec![None; task.images.len()];
    let terms = Terms { deadline: Instant::now() + DEADLINE, keys };
    let (sender, mut events) = mpsc::channel(64);
    let mut running = executor.start(Work { task, check: None, done, terms }, sender);
    let mut interrupted = std::pin::pin!(termination());
    let mut stopping = false;
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = &mut interrupted, if !stopping => {
                stopping = true;
                running.stop("interrupted".to_owned());
                continue;
            }
        };
        match event {
            Some(Event::Progress(progress)) => {
                for moment in &progress.images {
                    display.moment(moment);
                }
            }
            Some(Event::ImageEnded { index, result, .. }) => display.ended(index, &result),
            Some(Event::Ended(_, end)) => {
                let missing = end.images.iter().filter(|image| !image.outcome.is_there()).count();
                display.close();
                if missing > 0 {
                    writeln!(std::io::stderr(), "error: {}", end.reason).context("write to stderr")?;
                }
                return Ok(if missing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
            Some(Event::Crashed { reason, .. }) => anyhow::bail!(reason),
            Some(_) => {}
            None => anyhow::bail!("the pull ended without a result"),
        }
    }
}

fn key(config: Option<&RegistryConfig>, reference: &NormalizedReference) -> Key {
    match config.map(|config| config.matching(reference)) {
        Some(credentials) if !credentials.is_empty() => Key::Credentials { credentials },
        // As docker does: what the file does not speak of is pulled anonymously.
        _ => Key::Anonymous,
    }
}

/// Bars on a terminal, lines elsewhere.
enum Display {
    Bars(Vec<ProgressBar>),
    Lines(Vec<Line>),
}

struct Line {
    image: String,
    /// Tenths of the image that were told, and the phase.
    told: (u64, Option<ImagePhase>),
}

impl Display {
    fn new(images: &[ImageTask]) -> Self {
        if !std::io::stderr().is_terminal() {
            let line = |image: &ImageTask| Line { image: image.image.clone(), told: (0, None) };
            return Self::Lines(images.iter().map(line).collect());
        }
        let bars = MultiProgress::new();
        let style =
            ProgressStyle::with_template("{prefix:40!} [{bar:30}] {bytes:>10}/{total_bytes:<10} {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = |image: &ImageTask| {
            let bar = bars.add(ProgressBar::new(0).with_style(style.clone()));
            bar.set_prefix(image.image.clone());
            bar.set_message("waiting");
            bar
        };
        let all = images.iter().map(bar).collect();
        Self::Bars(all)
    }

    fn moment(&mut self, moment: &ImageProgress) {
        let index = moment.index as usize;
        let what = match moment.phase {
            ImagePhase::Waiting => "waiting".to_owned(),
            ImagePhase::Pulling => "pulling".to_owned(),
            ImagePhase::BackingOff => format!("to be tried again: {}", moment.reason),
            ImagePhase::Done => return,
        };
        match self {
            Self::Bars(bars) => {
                let Some(bar) = bars.get(index) else { return };
                if let Some(Bytes { done, total }) = moment.bytes {
                    bar.set_length(total);
                    bar.set_position(done);
                }
                bar.set_message(what);
            }
            Self::Lines(lines) => {
                let Some(line) = lines.get_mut(index) else { return };
                let tenths = moment.bytes.map_or(0, |Bytes { done, total }| done * 10 / total.max(1));
                if line.told != (tenths, Some(moment.phase)) {
                    line.told = (tenths, Some(moment.phase));
                    let bytes = moment
                        .bytes
                        .map(|Bytes { done, total }| format!(" {} of {} MiB", done >> 20, total >> 20));
                    say(&format!("{}: {what}{}", line.image, bytes.unwrap_or_default()));
                }
            }
        }
    }

    fn ended(&mut self, index: usize, result: &ImageResult) {
        let what = match result.outcome {
            ImageOutcome::Pulled => format!("pulled {}", result.digest.as_deref().unwrap_or_default()),
            ImageOutcome::Present => format!("present {}", result.digest.as_deref().unwrap_or_default()),
            ImageOutcome::Failed | ImageOutcome::Stopped => format!("FAILED: {}", result.reason),
        };
        match self {
            Self::Bars(bars) => {
                let Some(bar) = bars.get(index) else { return };
                if let Some(Bytes { done, total }) = result.bytes {
                    bar.set_length(total);
                    bar.set_position(done);
                }
                bar.finish_with_message(what);
            }
            Self::Lines(lines) => {
                if let Some(line) = lines.get(index) {
                    say(&format!("{}: {what}", line.image));
                }
            }
        }
    }

    fn close(&self) {
        if let Self::Bars(bars) = self {
            for bar in bars.iter().filter(|bar| !bar.is_finished()) {
                bar.abandon();
            }
        }
    }
}

fn say(line: &str) {
    // A closed pipe is no reason to stop a pull.
    let _ = writeln!(std::io::stdout(), "{line}");
}
