//! Numbers of things in sentences.

/// `1 node`, `2 nodes`: the number with its noun, which takes an `s`.
pub(crate) fn counted(number: impl Into<u64>, noun: &str) -> String {
    match number.into() {
        1 => format!("1 {noun}"),
        number => format!("{number} {noun}s"),
    }
}

pub(crate) fn counted_len(length: usize, noun: &str) -> String {
    counted(length as u64, noun)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_is_singular() {
        let texts = [0, 1, 2].map(|number| counted_len(number, "node"));
        assert_eq!(texts, ["0 nodes", "1 node", "2 nodes"]);
    }
}
