//! Output while we follow a job: bars on a terminal, a line for each change elsewhere, documents for programs.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiff::Timestamp;

use super::lines::Lines;
use super::render::render;
use super::view::View;
use crate::output::Output;
use crate::output::{Format, print, print_object};
use crate::problem;
use crate::screen::Screen;
use crate::session::{Ended, Session};

pub(crate) struct Show {
    way: Way,
    is_wide: bool,
    no_color: bool,
    is_lost: bool,
    trouble: Option<String>,
    /// When the API server was heard last.
    heard: Timestamp,
}

enum Way {
    Bars(ProgressBar),
    Lines(Lines),
    Documents(Format, Option<Box<View>>),
    /// Nothing but the name, at the end.
    Name,
}

impl Show {
    pub(crate) fn new(session: &Session) -> Self {
        let output = session.global.output;
        let way = match output.and_then(Output::format) {
            Some(format) => Way::Documents(format, None),
            None if output == Some(Output::Name) => Way::Name,
            None if session.screen.is_terminal => {
                let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
                // The template is a constant; a wrong one would be seen as the default style.
                let style =
                    ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
                Way::Bars(bar.with_style(style))
            }
            None => Way::Lines(Lines::default()),
        };
        let no_color = session.global.no_color;
        Self {
            way,
            is_wide: output == Some(Output::Wide),
            no_color,
            is_lost: false,
            trouble: None,
            heard: Timestamp::now(),
        }
    }

    pub(crate) fn has_bars(&self) -> bool {
        matches!(self.way, Way::Bars(_))
    }

    pub(crate) fn now(&mut self, view: &View) -> anyhow::Result<()> {
        match &mut self.way {
            Way::Bars(bar) => {
                // The person may have changed the size of the window.
                let text = render(view, Screen::of_stdout(self.no_color), self.is_wide);
                let trouble = self.trouble.as_deref().unwrap_or_default();
                bar.set_message(format!("{text}\n{trouble}").trim_end().to_owned());
                bar.tick();
                Ok(())
            }
            Way::Lines(lines) => {
                let lines = lines.about(view);
                if lines.is_empty() { Ok(()) } else { print(&format!("{}\n", lines.join("\n"))) }
            }
            Way::Documents(format, last) => {
                if last.as_deref() == Some(view) {
                    return Ok(());
                }
                *last = Some(Box::new(view.clone()));
                print_object(view, *format)
            }
            Way::Name => Ok(()),
        }
    }

    /// Makes room for the last page of a job that is over. Otherwise what was last seen of it stays.
    pub(crate) fn end(&self, ended: Ended) {
        match &self.way {
            Way::Bars(bar) if matches!(ended, Ended::Done | Ended::Failed) => bar.finish_and_clear(),
            Way::Bars(bar) => bar.abandon(),
            _ => {}
        }
    }

    pub(crate) fn last(&mut self, view: &View) -> anyhow::Result<()> {
        match &mut self.way {
            Way::Bars(_) => print(&render(view, Screen::of_stdout(self.no_color), self.is_wide)),
            Way::Lines(_) => {
                self.now(view)?;
                print(&format!("\n{}", render(view, Screen::of_stdout(self.no_color), self.is_wide)))
            }
            Way::Documents(..) => self.now(view),
            Way::Name => print(&format!("{}\n", view.full_name())),
        }
    }

    pub(crate) fn connected(&mut self) {
        self.is_lost = false;
        self.trouble = None;
        self.heard = Timestamp::now();
    }

    /// The API server does not answer, and is asked again.
    pub(crate) fn disconnected(&mut self, error: &anyhow::Error) {
        let since = self.heard.strftime("%H:%M:%S UTC");
        let text = format!("nothing was heard since {since}, trying again: {}", problem::text(error));
        if self.has_bars() {
            self.trouble = Some(text);
        } else if !self.is_lost {
            self.is_lost = true;
            problem::note(&text);
        }
    }
}
