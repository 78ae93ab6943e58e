//! Amounts and percentages, as settings write them.

use std::fmt;
use std::str::FromStr;

/// An amount of disk or memory: a percentage of the whole, or a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// From 0 to 100 percent of the whole.
    Percent(u8),
    /// A number of bytes, however large the whole is.
    Bytes(u64),
}

impl Amount {
    /// The amount in bytes, for a whole of `whole` bytes.
    pub(crate) fn in_bytes(self, whole: u64) -> u64 {
        match self {
            // The product is computed in 128 bits, and the result is at most `whole`.
            Self::Percent(part) => {
                u64::try_from(u128::from(whole) * u128::from(part) / 100).unwrap_or(u64::MAX)
            }
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(part) => write!(f, "{part}%"),
            Self::Bytes(bytes) => write!(f, "{} MiB", bytes >> 20),
        }
    }
}

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not an amount: write 10%, 512MiB or 5GiB");
        if let Some(part) = text.strip_suffix('%') {
            let part = part.trim().parse().ok().filter(|part| *part <= 100).ok_or_else(wrong)?;
            return Ok(Self::Percent(part));
        }
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit: u64 = match unit.trim() {
            // Zero needs no unit.
            "" if number.parse() == Ok(0) => 1,
            "" if !number.is_empty() => {
                return Err(format!("{text:?} has no unit: write 10%, 512MiB or 5GiB"));
            }
            "B" => 1,
            "KiB" | "Ki" => 1 << 10,
            "MiB" | "Mi" => 1 << 20,
            "GiB" | "Gi" => 1 << 30,
            "TiB" | "Ti" => 1 << 40,
            _ => return Err(wrong()),
        };
        number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .map(Self::Bytes)
            .ok_or_else(wrong)
    }
}

/// A percentage that may exceed 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percent(pub u32);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text).trim().parse();
        number.map(Self).map_err(|_| format!("{text:?} is not a percentage: write 90%"))
    }
}
