//! The waves of a rollout: how many nodes may have started by the end of each.

use std::fmt;

/// Waves of one job, at most: enough for any plan a person makes, little enough to look at.
pub const MAX_STEPS: usize = 20;

/// The size of one wave, the earlier ones included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaveStep {
    /// Of all nodes, from 1 to 100.
    Percent(u32),
    /// From 1.
    Nodes(u32),
}

/// Why a text is no step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no step: write a percentage from 1% to 100%, such as \"5%\", or a number of nodes, such as \"10\""
)]
pub struct WaveStepError(String);

impl WaveStep {
    /// Reads `5%` or `10`.
    pub fn parse(text: &str) -> Result<Self, WaveStepError> {
        let error = || WaveStepError(text.chars().take(40).collect());
        let (number, percent) = match text.strip_suffix('%') {
            Some(number) => (number, true),
            None => (text, false),
        };
        if !number.bytes().all(|b| b.is_ascii_digit()) {
            return Err(error());
        }
        match (number.parse(), percent) {
            (Ok(percent @ 1..=100), true) => Ok(Self::Percent(percent)),
            (Ok(nodes @ 1..), false) => Ok(Self::Nodes(nodes)),
            _ => Err(error()),
        }
    }

    /// How many of `desired` nodes; a part of a node is a whole one.
    pub fn nodes(self, desired: u32) -> u32 {
        match self {
            Self::Percent(percent) => {
                let nodes = (u64::from(desired) * u64::from(percent)).div_ceil(100);
                u32::try_from(nodes).unwrap_or(desired)
            }
            Self::Nodes(nodes) => nodes.min(desired),
        }
    }

    /// Whether a wave of this size is more than the one before, so far as that can be said without the nodes.
    pub fn follows(self, before: Self) -> bool {
        match (before, self) {
            (Self::Percent(before), Self::Percent(now)) | (Self::Nodes(before), Self::Nodes(now)) => {
                now > before
            }
            (Self::Percent(_), Self::Nodes(_)) | (Self::Nodes(_), Self::Percent(_)) => true,
        }
    }
}

impl fmt::Display for WaveStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Nodes(nodes) => write!(f, "{nodes}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_percentages_and_numbers() {
        for (text, nodes) in [("5%", 1), ("25%", 3), ("100%", 10), ("4", 4), ("40", 10)] {
            let step = WaveStep::parse(text).unwrap();
            assert_eq!((step.nodes(10), step.to_string().as_str()), (nodes, text));
        }
        for text in ["", "%", "0%", "101%", "0", "-1", "+1", "5.5%", "five", "5 %", "99999999999"] {
            assert!(WaveStep::parse(text).is_err(), "{text}");
        }
        assert_eq!(WaveStep::Percent(100).nodes(u32::MAX), u32::MAX);
    }

    #[test]
    fn waves_rise() {
        let step = |text| WaveStep::parse(text).unwrap();
        assert!(
            step("5%").follows(step("4%"))
                && !step("5%").follows(step("5%"))
                && !step("3").follows(step("4"))
        );
        assert!(step("1%").follows(step("4")));
    }
}
