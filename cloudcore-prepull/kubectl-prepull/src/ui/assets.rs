//! The files of the page, which are part of the program.

/// Type and text of a file.
pub(crate) fn asset(name: &str) -> Option<(&'static str, &'static str)> {
    const SCRIPT: &str = "text/javascript; charset=utf-8";
    Some(match name {
        "index.html" => ("text/html; charset=utf-8", include_str!("assets/index.html")),
        "page.css" => ("text/css; charset=utf-8", include_str!("assets/page.css")),
        "page.js" => (SCRIPT, include_str!("assets/page.js")),
        "chart.js" => (SCRIPT, include_str!("assets/chart.js")),
        "detail.js" => (SCRIPT, include_str!("assets/detail.js")),
        "dom.js" => (SCRIPT, include_str!("assets/dom.js")),
        "edge.js" => (SCRIPT, include_str!("assets/edge.js")),
        "edges.js" => (SCRIPT, include_str!("assets/edges.js")),
        "grid.js" => (SCRIPT, include_str!("assets/grid.js")),
        "job.js" => (SCRIPT, include_str!("assets/job.js")),
        "jobs.js" => (SCRIPT, include_str!("assets/jobs.js")),
        "live.js" => (SCRIPT, include_str!("assets/live.js")),
        "nodes.js" => (SCRIPT, include_str!("assets/nodes.js")),
        "place.js" => (SCRIPT, include_str!("assets/place.js")),
        "sites.js" => (SCRIPT, include_str!("assets/sites.js")),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_page_needs_only_its_own_files() {
        let (_, index) = asset("index.html").unwrap();
        let mut waiting = vec!["page.js".to_owned(), "page.css".to_owned()];
        assert!(waiting.iter().all(|name| index.contains(&format!("\"{name}\""))), "{index}");
        let mut seen = Vec::new();
        while let Some(name) = waiting.pop() {
            let (_, text) = asset(&name).unwrap_or_else(|| panic!("{name} is missing"));
            // The one address of a namespace is a name, and nothing is fetched from it.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!text.contains("http:") && !text.contains("https:") && !text.contains("url("), "{name}");
            let imports = text.lines().filter(|line| line.starts_with("import "));
            let named =
                imports.filter_map(|line| Some(line.split_once("\"./")?.1.split_once('"')?.0.to_owned()));
            waiting.extend(named.filter(|name| !seen.contains(name)));
            seen.push(name);
        }
        for name in [
            "chart.js",
            "detail.js",
            "dom.js",
            "edge.js",
            "edges.js",
            "grid.js",
            "job.js",
            "jobs.js",
            "live.js",
            "nodes.js",
            "place.js",
            "sites.js",
        ] {
            assert!(seen.iter().any(|seen| seen == name), "{name} is not used");
        }
    }
}
