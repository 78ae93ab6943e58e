//! Amounts of memory on the command line.

/// Memory below the smallest holds no site of a thousand nodes; the largest is more than a node of the cloud has to spare.
const MEMORY_RANGE: std::ops::RangeInclusive<usize> = 16 << 20..=16 << 30;

/// Parses an amount of memory, as `512MiB`.
pub(crate) fn parse_memory(text: &str) -> Result<usize, String> {
    let units = [("GiB", 30), ("Gi", 30), ("MiB", 20), ("Mi", 20)];
    let amount = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, 1_usize << shift)));
    let bytes = amount.and_then(|(number, unit)| number.parse::<usize>().ok()?.checked_mul(unit));
    let usable = bytes.filter(|bytes| MEMORY_RANGE.contains(bytes));
    usable.ok_or_else(|| "must be from 16MiB to 16GiB; the default is 256MiB".to_owned())
}

#[cfg(test)]
mod tests {
    use prepull_engine::sites::SiteSettings;

    use super::*;

    #[test]
    fn memory_has_a_unit_and_bounds() {
        for (text, bytes) in
            [("16MiB", 16 << 20), ("512Mi", 512 << 20), ("2GiB", 2 << 30), ("16Gi", 16 << 30)]
        {
            assert_eq!(parse_memory(text), Ok(bytes), "{text}");
        }
        for bad in ["", "256", "15MiB", "17GiB", "-1GiB", "1.5GiB", "99999999999999999999GiB", "GiB"] {
            assert!(parse_memory(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_memory("256MiB"), Ok(SiteSettings::default().memory));
    }
}
