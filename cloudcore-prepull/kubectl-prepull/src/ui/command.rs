//! `kubectl prepull ui`.

use std::convert::Infallible;
use std::future::pending;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use prepull_api::edges::SITE_LABEL;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::time::timeout;

use crate::cluster::Cluster;
use crate::edges;
use crate::output::print;
use crate::problem;
use crate::session::{CommandOutcome, Session};
use crate::ui::guard::Guard;
use crate::ui::peer::{OwnListener, PagePeer};
use crate::ui::server::{PageContext, router};
use crate::ui::watching::Watching;

/// Programs that open an address in the browser: of Linux desktops, of macOS.
const OPENERS: [&str; 2] = ["xdg-open", "open"];

/// Longest wait for the leader's site label: we print the address after it.
const SITE_LABEL_WITHIN: Duration = Duration::from_secs(3);

/// The arguments of `ui`.
#[derive(Debug, Args)]
#[command(after_help = "\
The page is served on 127.0.0.1 until Ctrl-C, to programs of your own that have the printed address; its token is a new one
each time. On other systems than Linux the address alone decides. It sees and does what the kubeconfig may; nothing is
installed in the cluster, and nothing is loaded from elsewhere.

Examples:
  kubectl prepull ui
  kubectl prepull ui --port 8001 --no-open    # on another machine: ssh -L 8001:127.0.0.1:8001 HOST")]
pub(crate) struct UiArgs {
    /// Port of the page [default: any that is free].
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// Only print the address.
    #[arg(long)]
    no_open: bool,
    /// The label of Nodes that holds their site [default: that of cloudcore-prepull run --site-label].
    #[arg(long, value_name = "KEY")]
    site_label: Option<String>,
}

pub(crate) async fn run(
    session: &Session,
    cluster: Cluster,
    args: &UiArgs,
) -> anyhow::Result<CommandOutcome> {
    let listener = TcpListener::bind(("127.0.0.1", args.port)).await.with_context(|| {
        format!("--port {}: the page cannot be served there; another program may have the port", args.port)
    })?;
    let address = listener.local_addr()?;
    let guard = Guard::new(address)?;
    let url = guard.url();
    let site_label = match &args.site_label {
        Some(label) => Some(label.clone()),
        // Without an answer there is a page all the same.
        None => timeout(SITE_LABEL_WITHIN, edges::site_label(&cluster)).await.unwrap_or_default(),
    };
    let page = Arc::new(PageContext {
        guard,
        address,
        cluster,
        watching: Watching::new(),
        site_label: site_label.as_deref().unwrap_or(SITE_LABEL).into(),
    });
    print(&format!("{url}\n"))?;
    let opens = !args.no_open && session.screen.is_terminal;
    let opening = async {
        if opens {
            open_browser(&url).await;
        }
    };
    Box::pin(serve(listener, page, opening)).await
}

/// Serves the page until Ctrl-C, and opens it beside that.
async fn serve(
    listener: TcpListener,
    page: Arc<PageContext>,
    opening: impl Future<Output = ()>,
) -> anyhow::Result<CommandOutcome> {
    let listener = OwnListener::new(listener, page.address);
    let router = router(Arc::clone(&page)).into_make_service_with_connect_info::<PagePeer>();
    let served = axum::serve(listener, router);
    // On many systems the opener lasts as long as its browser, which waits for the page; and its end isn't that of the page.
    let opened = async {
        opening.await;
        pending::<Infallible>().await
    };
    tokio::select! {
        never = opened => match never {},
        served = served.into_future() => Err(anyhow!("the page is served no longer: {served:?}")),
        watched = page.watching.run(&page.cluster) => match watched {
            Ok(()) => Err(anyhow!("the watch of the jobs has ended")),
            Err(error) => Err(problem::explain(error, page.cluster.place())),
        },
        interrupted = tokio::signal::ctrl_c() => {
            interrupted.context("Ctrl-C cannot be waited for")?;
            Ok(CommandOutcome::Done)
        }
    }
}

async fn open_browser(url: &str) {
    for opener in OPENERS {
        let mut command = Command::new(opener);
        command.arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if command.status().await.is_ok_and(|status| status.success()) {
            return;
        }
    }
    problem::print_note("no browser could be opened: open the address above yourself");
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::session::GlobalArgs;

    /// No server listens on port 1.
    const DEAD: &str = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "users": [{"name": "u", "user": {}}]}"#;

    /// What the page's server answers first, with this opener.
    async fn answer_beside(opening: impl Future<Output = ()>) -> String {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("kubeconfig");
        std::fs::write(&kubeconfig, DEAD).unwrap();
        let global = GlobalArgs { kubeconfig: Some(kubeconfig), ..GlobalArgs::default() };
        let cluster = Cluster::connect(&global).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (guard, watching) = (Guard::new(address).unwrap(), Watching::new());
        let page = Arc::new(PageContext { guard, address, cluster, watching, site_label: SITE_LABEL.into() });
        let asking = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream
                .write_all(b"GET / HTTP/1.1\r\nHost: elsewhere\r\nConnection: close\r\n\r\n")
                .await
                .unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let asked = async {
            tokio::select! {
                ended = Box::pin(serve(listener, page, opening)) => format!("{:?}", ended.err()),
                answer = asking => answer,
            }
        };
        timeout(Duration::from_secs(10), asked).await.unwrap_or_default()
    }

    #[tokio::test]
    async fn no_opener_stops_the_page() {
        for answer in [answer_beside(pending()).await, answer_beside(async {}).await] {
            assert!(answer.starts_with("HTTP/1.1 421 "), "{answer:?}");
        }
    }
}
