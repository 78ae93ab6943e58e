//! Output while we follow a job: bars on a terminal, a line for each change elsewhere, documents for programs.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiff::Timestamp;

use super::lines::Lines;
use super::render::render_view;
use super::view::JobView;
use crate::output::OutputFormat;
use crate::output::{DocumentFormat, print, print_object, print_separator};
use crate::problem;
use crate::screen::Screen;
use crate::session::{CommandOutcome, Session};

pub(crate) struct Show {
    way: ShowMode,
    is_wide: bool,
    no_color: bool,
    is_lost: bool,
    trouble: Option<String>,
    /// When the API server was heard last.
    heard: Timestamp,
}

enum ShowMode {
    Bars(ProgressBar),
    Lines(Lines),
    /// With the view that was printed last, without its clock.
    Documents(DocumentFormat, Option<Box<JobView>>),
    /// Nothing but the name, at the end.
    Name,
}

impl Show {
    pub(crate) fn new(session: &Session) -> Self {
        let output = session.global.output;
        let way = match output.and_then(OutputFormat::format) {
            Some(format) => ShowMode::Documents(format, None),
            None if output == Some(OutputFormat::Name) => ShowMode::Name,
            None if session.screen.is_terminal => {
                let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
                // The template is a constant; a wrong one would be seen as the default style.
                let style =
                    ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
                ShowMode::Bars(bar.with_style(style))
            }
            None => ShowMode::Lines(Lines::default()),
        };
        let no_color = session.global.no_color;
        Self {
            way,
            is_wide: output == Some(OutputFormat::Wide),
            no_color,
            is_lost: false,
            trouble: None,
            heard: Timestamp::now(),
        }
    }

    pub(crate) fn has_bars(&self) -> bool {
        matches!(self.way, ShowMode::Bars(_))
    }

    pub(crate) fn draw_view(&mut self, view: &JobView) -> anyhow::Result<()> {
        match &mut self.way {
            ShowMode::Bars(bar) => {
                // The person may have changed the size of the window.
                let text = render_view(view, Screen::of_stdout(self.no_color), self.is_wide);
                let trouble = self.trouble.as_deref().unwrap_or_default();
                bar.set_message(format!("{text}\n{trouble}").trim_end().to_owned());
                bar.tick();
                Ok(())
            }
            ShowMode::Lines(lines) => {
                let lines = lines.describe_changes(view);
                if lines.is_empty() { Ok(()) } else { print(&format!("{}\n", lines.join("\n"))) }
            }
            ShowMode::Documents(format, last) => {
                let still = view.without_clock();
                if last.as_deref() == Some(&still) {
                    return Ok(());
                }
                if last.is_some() {
                    print_separator(*format)?;
                }
                *last = Some(Box::new(still));
                print_object(view, *format)
            }
            ShowMode::Name => Ok(()),
        }
    }

    /// Makes room for the last page of a job that is over. Otherwise what was last seen of it stays.
    pub(crate) fn finish_bars(&self, ended: CommandOutcome) {
        match &self.way {
            ShowMode::Bars(bar) if matches!(ended, CommandOutcome::Done | CommandOutcome::Failed) => {
                bar.finish_and_clear();
            }
            ShowMode::Bars(bar) => bar.abandon(),
            _ => {}
        }
    }

    pub(crate) fn print_last(&mut self, view: &JobView) -> anyhow::Result<()> {
        match &mut self.way {
            ShowMode::Bars(_) => print(&render_view(view, Screen::of_stdout(self.no_color), self.is_wide)),
            ShowMode::Lines(_) => {
                self.draw_view(view)?;
                print(&format!("\n{}", render_view(view, Screen::of_stdout(self.no_color), self.is_wide)))
            }
            ShowMode::Documents(..) => self.draw_view(view),
            ShowMode::Name => print(&format!("{}\n", view.full_name())),
        }
    }

    pub(crate) fn mark_connected(&mut self) {
        self.is_lost = false;
        self.trouble = None;
        self.heard = Timestamp::now();
    }

    /// The API server does not answer, and is asked again.
    pub(crate) fn mark_disconnected(&mut self, error: &anyhow::Error) {
        let since = self.heard.strftime("%H:%M:%S UTC");
        let text = format!("nothing was heard since {since}, trying again: {}", problem::error_text(error));
        if self.has_bars() {
            self.trouble = Some(text);
        } else if !self.is_lost {
            self.is_lost = true;
            problem::print_note(&text);
        }
    }
}
