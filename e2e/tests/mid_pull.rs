//! Set-up for tests that kill a side or cut a link: a site with one node in the middle of a pull.

use prepull_e2e::prelude::*;

pub(crate) const SMALL: u64 = MIB / 4;
pub(crate) const LARGE: u64 = 12 * MIB;
/// Rate of the link. At this rate a pull takes some seconds.
pub(crate) const SLOW: Option<u64> = Some(4 * MIB);

/// A site with one node in the middle of a pull: one of the image's two layers is complete, the other one is not.
pub(crate) struct MidPull<J> {
    pub(crate) site: Site,
    pub(crate) tunnel: Proxy,
    pub(crate) node: EdgeNode,
    pub(crate) job: J,
    pub(crate) image: Image,
    pub(crate) reference: String,
}

impl<J> MidPull<J> {
    /// Starts the pull. `apply` creates a job that pulls the image of this name on `edge-1`.
    pub(crate) async fn start(
        site: Site,
        name: &str,
        apply: impl AsyncFnOnce(&Site, &str) -> Result<J>,
    ) -> Result<Self> {
        let tunnel = Proxy::for_tcp(site.cloud.tunnel_addr())?;
        let node = site.add_node("edge-1").await?.tunnel_through(&tunnel).await?;
        let (image, reference) = site.seed_image(name, &[SMALL, LARGE])?;
        site.link.throttle(SLOW);
        let job = apply(&site, &reference).await?;
        site.link_carries(LARGE / 3).await?;
        node.accepts_a_task().await?;
        let [_, small, large] = image.blobs() else { bail!("three blobs, not {:?}", image.blobs()) };
        ensure!(site.link.bytes_of(small) >= SMALL, "the small layer is not whole");
        ensure!(site.link.bytes_of(large) < LARGE, "the large layer is whole");
        Ok(Self { site, tunnel, node, job, image, reference })
    }

    /// Checks that nothing of the complete layer was fetched again, and little of the other one.
    pub(crate) fn nothing_was_pulled_twice(&self) -> Result<()> {
        for blob in self.image.blobs() {
            let size = std::fs::metadata(self.image.blob_file(blob))?.len();
            let fetched = self.site.link.bytes_of(blob);
            // Bytes in transit at the interruption, at most the size of the sockets' buffers.
            let again = if size > SMALL * 2 { LARGE / 4 } else { 0 };
            ensure!(fetched <= size + again, "{fetched} bytes of {blob}, which has {size}");
        }
        Ok(())
    }
}
