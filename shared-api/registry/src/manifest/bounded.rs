//! Lists and maps with a bound: four mebibytes of small entries take ten times as much when they're read.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Most entries of a list. The largest indexes have some dozens of platforms, and images up to 127 layers.
pub(super) const MAX_ENTRIES: usize = 1024;
/// Most annotations of one entry; a build writes a dozen of them. Further ones are dropped.
const MAX_ANNOTATIONS: usize = 64;

/// Annotations by their names.
pub(crate) type Annotations = BTreeMap<String, String>;

/// Reads a list, and at most one entry more than it may have: the caller refuses that.
pub(super) fn few_entries<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Vec<T>, D::Error> {
    from.deserialize_any(FewEntries(PhantomData))
}

/// Reads the first annotations.
pub(super) fn few_annotations<'de, D: Deserializer<'de>>(from: D) -> Result<Annotations, D::Error> {
    annotations_of(from, |_| true)
}

/// Reads the first annotations with such names.
pub(crate) fn annotations_of<'de, D: Deserializer<'de>>(
    from: D,
    is_used: fn(&str) -> bool,
) -> Result<Annotations, D::Error> {
    from.deserialize_any(FewAnnotations(is_used))
}

struct FewEntries<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for FewEntries<T> {
    type Value = Vec<T>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a list")
    }

    /// Go's programs write `null` for an empty list.
    fn visit_unit<E: Error>(self) -> Result<Vec<T>, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<T>, A::Error> {
        let mut kept = Vec::new();
        while kept.len() <= MAX_ENTRIES {
            let Some(entry) = entries.next_element()? else { return Ok(kept) };
            kept.push(entry);
        }
        while entries.next_element::<IgnoredAny>()?.is_some() {}
        Ok(kept)
    }
}

struct FewAnnotations(fn(&str) -> bool);

impl<'de> Visitor<'de> for FewAnnotations {
    type Value = Annotations;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a map of texts")
    }

    /// Go's programs write `null` for an empty map.
    fn visit_unit<E: Error>(self) -> Result<Annotations, E> {
        Ok(Annotations::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Annotations, A::Error> {
        let mut kept = Annotations::new();
        while let Some(name) = entries.next_key::<String>()? {
            if kept.len() < MAX_ANNOTATIONS && (self.0)(&name) {
                kept.insert(name, entries.next_value()?);
            } else {
                entries.next_value::<IgnoredAny>()?;
            }
        }
        Ok(kept)
    }
}
