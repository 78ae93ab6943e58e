//! Versions of agents.

/// Major, minor and patch number; none for a version of another kind.
pub(crate) fn parse(version: &str) -> Option<(u32, u32, u32)> {
    let mut numbers = version.split(['.', '-', '+']).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0)))
}
