//! The time zone of the machine, by its name in the IANA database.

use std::path::Path;

use prepull_window::is_zone;

/// Finds the name like other programs on the machine: the variable TZ, the link /etc/localtime, the file /etc/timezone.
/// `None` without a known name.
pub(crate) fn find_name() -> Option<String> {
    let variable = std::env::var("TZ").ok();
    let link = std::fs::read_link("/etc/localtime").ok();
    let file = std::fs::read_to_string("/etc/timezone").ok();
    choose_name(variable.as_deref(), link.as_deref(), file.as_deref())
}

fn choose_name(variable: Option<&str>, link: Option<&Path>, file: Option<&str>) -> Option<String> {
    let of_variable = variable.map(|text| text.trim_start_matches(':'));
    let of_link =
        link.and_then(Path::to_str).and_then(|path| path.split_once("/zoneinfo/")).map(|(_, name)| name);
    let of_link = of_link.map(|name| name.trim_start_matches("posix/").trim_start_matches("right/"));
    let of_file = file.and_then(|text| text.lines().next()).map(str::trim);
    [of_variable, of_link, of_file].into_iter().flatten().find(|name| is_zone(name)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_zone_comes_from_variable_or_files() {
        let found = |variable, link: &str, file| choose_name(variable, Some(Path::new(link)), file);
        let berlin = "/usr/share/zoneinfo/Europe/Berlin";
        assert_eq!(found(Some(":Asia/Tokyo"), berlin, Some("UTC\n")).as_deref(), Some("Asia/Tokyo"));
        assert_eq!(found(None, berlin, Some("UTC\n")).as_deref(), Some("Europe/Berlin"));
        // A rule instead of a name, and a copy instead of a link.
        assert_eq!(found(Some("CET-1CEST"), "../usr/share/zoneinfo/posix/UTC", None).as_deref(), Some("UTC"));
        assert_eq!(found(Some(""), "/nix/tz", Some("Asia/Kolkata\n")).as_deref(), Some("Asia/Kolkata"));
        assert_eq!(choose_name(None, None, Some("Nowhere")), None);
    }
}
