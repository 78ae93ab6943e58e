//! The tolerated part of failed nodes, without floating point: 0.1 of 10 nodes is exactly one node.

use std::fmt;

/// Decimals of a ratio, at most. With them `exceeded_by` stays below 2^124 for any two `u32`.
const MAX_DECIMALS: usize = 18;

/// A number from 0 to 1, as it was written in decimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ratio {
    /// The value is `digits / 10^decimals`. No trailing zero, so that equal ratios are equal.
    digits: u64,
    decimals: u32,
}

/// Why a text is no ratio.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RatioError {
    /// Not a decimal number.
    #[error("{0:?} is not a decimal number: write a ratio such as 0.1 for one node in ten")]
    NotDecimal(String),
    /// A number outside the range.
    #[error("{0} is not between 0 and 1: write a ratio such as 0.1 for one node in ten")]
    OutOfRange(String),
    /// More digits than we reckon with.
    #[error("{0} has more than {MAX_DECIMALS} decimals")]
    TooFine(String),
}

impl Ratio {
    /// One in ten, KubeEdge's default.
    pub const DEFAULT: Self = Self { digits: 1, decimals: 1 };

    /// Reads `0.1`, `.5`, `1.`, `1`. An empty text is [`Self::DEFAULT`].
    pub fn parse(text: &str) -> Result<Self, RatioError> {
        if text.is_empty() {
            return Ok(Self::DEFAULT);
        }
        let shown = || text.chars().take(40).collect::<String>();
        let (negative, number) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let all_digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
        if !all_digits(whole) || !all_digits(fraction) || (whole.is_empty() && fraction.is_empty()) {
            return Err(RatioError::NotDecimal(shown()));
        }
        let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
        let is_zero = whole.is_empty() && fraction.is_empty();
        if (negative && !is_zero) || !matches!((whole, fraction), ("", _) | ("1", "")) {
            return Err(RatioError::OutOfRange(shown()));
        }
        if fraction.len() > MAX_DECIMALS {
            return Err(RatioError::TooFine(shown()));
        }
        if whole == "1" {
            return Ok(Self { digits: 1, decimals: 0 });
        }
        // At most 18 digits: they always fit.
        let digits = fraction.bytes().fold(0, |number: u64, digit| number * 10 + u64::from(digit - b'0'));
        // At most MAX_DECIMALS.
        let decimals = u32::try_from(fraction.len()).unwrap_or(u32::MAX);
        Ok(Self { digits, decimals })
    }

    /// Whether `failed` nodes of `desired` are more than is tolerated. Exactly the ratio is tolerated.
    pub fn exceeded_by(self, failed: u32, desired: u32) -> bool {
        u128::from(failed) * 10u128.pow(self.decimals) > u128::from(self.digits) * u128::from(desired)
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.decimals {
            0 => write!(f, "{}", self.digits),
            decimals => write!(f, "0.{:0width$}", self.digits, width = decimals as usize),
        }
    }
}
