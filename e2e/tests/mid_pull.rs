//! One node in the middle of a pull, for the tests that kill a side or cut a link then.

use prepull_e2e::prelude::*;

pub(crate) const SMALL: u64 = MIB / 4;
pub(crate) const LARGE: u64 = 12 * MIB;
/// A pull takes some seconds with it.
pub(crate) const SLOW: Option<u64> = Some(4 * MIB);

/// A site with one node that is in the middle of a pull: of the image's two layers one is whole, the other is not.
pub(crate) struct MidPull<J> {
    pub(crate) site: Site,
    pub(crate) tunnel: Proxy,
    pub(crate) node: EdgeNode,
    pub(crate) job: J,
    pub(crate) image: Image,
    pub(crate) reference: String,
}

impl<J> MidPull<J> {
    /// `apply` creates a job that pulls the image of that name on `edge-1`.
    pub(crate) async fn start(
        site: Site,
        name: &str,
        apply: impl AsyncFnOnce(&Site, &str) -> Result<J>,
    ) -> Result<Self> {
        let tunnel = Proxy::tcp(site.cloud.tunnel_addr())?;
        let node = site.node("edge-1").await?.tunnel_through(&tunnel).await?;
        let (image, reference) = site.image(name, &[SMALL, LARGE])?;
        site.link.throttle(SLOW);
        let job = apply(&site, &reference).await?;
        site.link_carries(LARGE / 3).await?;
        node.accepts_a_task().await?;
        let [_, small, large] = image.blobs() else { bail!("three blobs, not {:?}", image.blobs()) };
        ensure!(site.link.bytes_of(small) >= SMALL, "the small layer is not whole");
        ensure!(site.link.bytes_of(large) < LARGE, "the large layer is whole");
        Ok(Self { site, tunnel, node, job, image, reference })
    }

    /// Of what was whole nothing was fetched again, and of the rest little.
    pub(crate) fn nothing_was_pulled_twice(&self) -> Result<()> {
        for blob in self.image.blobs() {
            let size = std::fs::metadata(self.image.blob_file(blob))?.len();
            let fetched = self.site.link.bytes_of(blob);
            // On the way, and not yet written, when the pull was interrupted: at most what sockets hold.
            let again = if size > SMALL * 2 { LARGE / 4 } else { 0 };
            ensure!(fetched <= size + again, "{fetched} bytes of {blob}, which has {size}");
        }
        Ok(())
    }
}
