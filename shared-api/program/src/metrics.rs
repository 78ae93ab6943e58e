//! A macro that declares a set of metrics, each metric once.

use std::fmt::Write as _;

pub use prometheus_client::registry::Registry;

/// Upper bounds in seconds of what takes a moment on a good link and hours on a bad one: pulls, and tasks of several.
pub const DURATION_BUCKETS: [f64; 10] =
    [1.0, 5.0, 15.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 14_400.0, 43_200.0];

/// One label of a metric: its name and its value.
pub type Label<V = &'static str> = [(&'static str, V); 1];
/// Two labels of a metric.
pub type TwoLabels = [(&'static str, &'static str); 2];

/// The text format of Prometheus, of the text format of OpenMetrics, for those who do not ask for the latter: `curl`, and
/// `promtool check metrics`. They differ in the names of counters' families, and in the last line.
pub fn to_prometheus_text(openmetrics: &str) -> String {
    // Writing to a String cannot fail.
    let mut text = String::with_capacity(openmetrics.len());
    // The help of a family comes before its type, which decides on the name of both.
    let mut help = None;
    for line in openmetrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((family, kind)) =
            line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some((_, said)) = help.take() {
                let _ = writeln!(text, "# HELP {family}{suffix} {said}");
            }
            let _ = writeln!(text, "# TYPE {family}{suffix} {kind}");
        } else if !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Declares a set of metrics, each once: a field is the metric of its name, its doc comment is the help text, and the
/// value after `=` the empty metric, where the type has no default. A clone shares the values. Written here because
/// prometheus-client has no derive for it.
#[macro_export]
macro_rules! metrics {
    ($(#[$doc:meta])* $visibility:vis struct $Set:ident {
        $(#[doc = $help:literal] $name:ident: $Metric:ty $(= $empty:expr)?,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        $visibility struct $Set {
            $(#[doc = $help] $name: $Metric,)*
        }

        impl $Set {
            /// The names of the metrics, without the prefix of the program and the suffix of counters.
            #[cfg(test)]
            pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Adds the metrics to a registry.
            pub(crate) fn register(&self, registry: &mut $crate::metrics::Registry) {
                $(registry.register(stringify!($name), $help.trim_start(), self.$name.clone());)*
            }
        }

        impl Default for $Set {
            fn default() -> Self {
                Self { $($name: $crate::metrics!(@empty $($empty)?),)* }
            }
        }
    };
    (@empty) => { Default::default() };
    (@empty $empty:expr) => { $empty };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_have_one_name_in_prometheus_text() {
        let openmetrics = "\
# HELP p_jobs Jobs # by phase.
# TYPE p_jobs gauge
p_jobs{phase=\"a\"} 3
# HELP p_results Results.
# TYPE p_results counter
p_results_total{outcome=\"x\"} 1
# HELP p_s Seconds.
# TYPE p_s histogram
p_s_bucket{le=\"+Inf\"} 1
# EOF
";
        let prometheus = "\
# HELP p_jobs Jobs # by phase.
# TYPE p_jobs gauge
p_jobs{phase=\"a\"} 3
# HELP p_results_total Results.
# TYPE p_results_total counter
p_results_total{outcome=\"x\"} 1
# HELP p_s Seconds.
# TYPE p_s histogram
p_s_bucket{le=\"+Inf\"} 1
";
        assert_eq!(to_prometheus_text(openmetrics), prometheus);
    }
}
