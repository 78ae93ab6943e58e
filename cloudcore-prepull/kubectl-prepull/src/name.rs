//! Names of jobs on the command line: ours by the name alone, OpenKruise's with the kind in front.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use prepull_api::crd::kruise;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum JobName {
    Own(String),
    /// A job of OpenKruise's API, in the namespace of the command.
    Kruise(KruiseName),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KruiseName {
    pub(crate) kind: KruiseKind,
    pub(crate) name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KruiseKind {
    Pull,
    /// Several images, by a job of the other kind for each.
    List,
}

impl KruiseKind {
    /// The kind as it is written in front of a name.
    pub(crate) fn singular(self) -> &'static str {
        match self {
            Self::Pull => "imagepulljob",
            Self::List => "imagelistpulljob",
        }
    }
}

impl fmt::Display for KruiseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind.singular(), self.name)
    }
}

impl FromStr for JobName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((kind, name)) = text.split_once('/') else { return Ok(Self::Own(text.to_owned())) };
        let (kind, group) = kind.split_once('.').map_or((kind, None), |(kind, group)| (kind, Some(group)));
        let kind = match (kind.to_ascii_lowercase().as_str(), group) {
            ("imageprepulljob" | "imageprepulljobs" | "ippj", _) => return Ok(Self::Own(name.to_owned())),
            ("imagepulljob" | "imagepulljobs", None | Some(kruise::GROUP)) => KruiseKind::Pull,
            ("imagelistpulljob" | "imagelistpulljobs", None | Some(kruise::GROUP)) => KruiseKind::List,
            _ => {
                return Err("a job is NAME, imagepulljob/NAME or imagelistpulljob/NAME".to_owned());
            }
        };
        Ok(Self::Kruise(KruiseName { kind, name: name.to_owned() }))
    }
}

/// The argument of the commands that change an ImagePrePullJob.
#[derive(Debug, Args)]
pub(crate) struct OwnJob {
    /// The job.
    #[arg(value_parser = parse_own)]
    pub(crate) job: String,
}

fn parse_own(text: &str) -> Result<String, String> {
    match text.parse()? {
        JobName::Own(name) => Ok(name),
        JobName::Kruise(name) => Err(format!(
            "this command changes ImagePrePullJobs only; OpenKruise's jobs are changed by kubectl: kubectl edit {name}"
        )),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn jobs_are_named_as_in_kubectl() {
        for own in ["web", "ippj/web", "imageprepulljob.operations.kubeedge.io/web"] {
            assert_eq!(own.parse(), Ok(JobName::Own("web".to_owned())), "{own}");
            assert_eq!(parse_own(own).unwrap(), "web");
        }
        for (text, shown) in [
            ("imagepulljob/web", "imagepulljob/web"),
            ("ImagePullJobs/web", "imagepulljob/web"),
            ("imagelistpulljob.apps.kruise.io/web", "imagelistpulljob/web"),
        ] {
            let JobName::Kruise(name) = text.parse().unwrap() else { panic!("{text}") };
            assert_eq!(name.to_string(), shown);
            assert!(parse_own(text).unwrap_err().contains("kubectl edit image"), "{text}");
        }
        for wrong in ["job/web", "imagepulljob.example.org/web"] {
            assert!(wrong.parse::<JobName>().unwrap_err().contains("imagepulljob/NAME"), "{wrong}");
        }
    }
}
