//! Runtime of the harness itself, on threads of its own: it continues while a test blocks.

use std::sync::LazyLock;

use anyhow::{Result, anyhow};
use tokio::runtime::{Builder, Handle, Runtime};

static RUNTIME: LazyLock<std::io::Result<Runtime>> = LazyLock::new(|| {
    Builder::new_multi_thread().worker_threads(2).thread_name("harness").enable_all().build()
});

/// Returns the runtime for proxies and simulated edges.
pub(crate) fn runtime() -> Result<&'static Handle> {
    RUNTIME.as_ref().map(Runtime::handle).map_err(|error| anyhow!("no runtime for the harness: {error}"))
}
