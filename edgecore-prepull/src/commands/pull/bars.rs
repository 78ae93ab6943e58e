//! Bars of `edgecore-prepull pull`.

use indicatif::{ProgressBar, ProgressStyle};

use prepull_api::task::ByteProgress;

/// Shows bytes, with their rate and the time left.
pub(super) fn show_bytes(bar: &ProgressBar, ByteProgress { done, total }: ByteProgress) {
    let begins = bar.length() != Some(total);
    bar.set_style(style("  {prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec}, {eta} left"));
    bar.set_length(total);
    bar.set_position(done);
    if begins {
        // Bytes of an earlier pull must not count towards the rate.
        bar.reset_eta();
    }
}

pub(super) fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
