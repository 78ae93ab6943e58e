//! How a set of metrics is declared, each metric once.

pub use prometheus_client::registry::Registry;

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
