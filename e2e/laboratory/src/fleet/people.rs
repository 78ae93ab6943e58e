//! The cost of people's tools at the size of the fleet: commands of `kubectl prepull` and its page, both through the
//! API server, and a real Prometheus that scrapes cloudcore-prepull.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use prepull_e2e::cleanup::{SOON, eventually};
use prepull_e2e::plugin::{PageServer, Person};
use prepull_e2e::prometheus::{Prometheus, dashboard};
use prepull_e2e::teller::Teller;
use prepull_e2e::usage::Usage;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::scene::FleetScene;

/// Limit for one answer of the page.
const PATIENCE: Duration = Duration::from_secs(60);

/// The cost of people's tools.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PeopleFigures {
    /// Commands of the plugin, each in its own process.
    pub commands: Vec<Cost>,
    /// Requests of the page, one after the other; memory is that of its server, so far.
    pub page: Vec<Cost>,
    /// The scrapes during the job.
    pub scrapes: Scrapes,
}

/// The cost of one command or request.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Cost {
    /// The command or request.
    pub what: String,
    /// Seconds to the end of it.
    pub seconds: f64,
    /// Bytes of the output.
    pub bytes: usize,
    /// Largest resident memory so far.
    pub peak: u64,
}

/// Results of a Prometheus that scrapes once a second.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Scrapes {
    /// Samples of one scrape: before the job, at most, and after it.
    pub samples: [f64; 3],
    /// Bytes of the last scrape.
    pub bytes: usize,
    /// Seconds of the slowest scrape.
    pub slowest_seconds: f64,
    /// Rules of the alerts. All could be evaluated.
    pub rules: usize,
    /// Queries of the dashboard. All were answered.
    pub queries: usize,
    /// Resident memory of the Prometheus.
    pub rss: u64,
}

/// A Prometheus that scrapes the cloud, with its samples before the job.
pub(super) struct Scraping {
    prometheus: Prometheus,
    before: f64,
}

impl FleetScene {
    /// Starts a Prometheus that scrapes the cloud.
    pub(super) async fn start_scraping(&self) -> Result<Scraping> {
        let prometheus = Prometheus::start(&self.cluster, &[self.cloud.metrics_addr()]).await?;
        let before =
            eventually("it has scraped", SOON, async || prometheus.value("scrape_samples_scraped > 0").await)
                .await?;
        Ok(Scraping { prometheus, before })
    }

    /// Measures what people would run once the job of this name has ended.
    pub(super) async fn measure_people(
        &self,
        job: &str,
        scraping: Scraping,
        teller: &Teller,
    ) -> Result<PeopleFigures> {
        teller.step("kubectl prepull, its page, and the scrapes of Prometheus");
        let person = Person::new(self.cluster.kubeconfig());
        let one = self.fleet.names().first().context("no edges")?;
        let lines = [
            "nodes".to_owned(),
            "nodes -o json".to_owned(),
            "nodes --away".to_owned(),
            format!("status {job}"),
            format!("failures {job}"),
            format!("why {one} {job}"),
            "check".to_owned(),
        ];
        let mut commands = Vec::new();
        for what in lines {
            let (said, took, peak) = person.runs_measured(&what).await?;
            // check and why may find a problem.
            let may_find = what == "check" || what.starts_with("why ");
            ensure!(said.status == 0 || may_find, "{what}: {}", said.err);
            commands.push(Cost { what, seconds: took.as_secs_f64(), bytes: said.out.len(), peak });
        }
        let page = self.measure_page(&person, job).await?;
        let scrapes = self.measure_scrapes(scraping).await?;
        Ok(PeopleFigures { commands, page, scrapes })
    }

    async fn measure_page(&self, person: &Person, job: &str) -> Result<Vec<Cost>> {
        let began = Instant::now();
        let page = person.serves_page().await?;
        let nodes = self.fleet.names().len();
        let mut costs = Vec::new();
        for (what, path, word, words) in [
            ("ui, until all jobs are there", "live".to_owned(), "event: jobs", 1),
            ("all squares of the job", format!("live/{job}"), "\"attempt\":", nodes),
            ("all edges", "edges".to_owned(), "\"ready\":", nodes),
        ] {
            let asked = if costs.is_empty() { began } else { Instant::now() };
            let bytes = tokio::time::timeout(PATIENCE, read_until(&page, &path, word, words))
                .await
                .with_context(|| format!("{what} takes longer than {PATIENCE:?}"))??;
            let (seconds, peak) = (asked.elapsed().as_secs_f64(), page.usage()?.peak);
            costs.push(Cost { what: what.to_owned(), seconds, bytes, peak });
        }
        Ok(costs)
    }

    async fn measure_scrapes(&self, Scraping { prometheus, before }: Scraping) -> Result<Scrapes> {
        let rules = prometheus.rules_are_sound().await?;
        let queries = dashboard()?;
        for query in &queries {
            prometheus.query(query).await?;
        }
        let most = prometheus.value("max_over_time(scrape_samples_scraped[1h])").await?;
        Ok(Scrapes {
            samples: [before, most, prometheus.value("scrape_samples_scraped").await?],
            bytes: self.cloud.metrics().await?.0.len(),
            slowest_seconds: prometheus.value("max_over_time(scrape_duration_seconds[1h])").await?,
            rules,
            queries: queries.len(),
            rss: Usage::of_process(prometheus.pid())?.rss,
        })
    }
}

/// Reads an answer of the page until it has a word `words` times, and returns the bytes until then: a stream has no
/// end.
async fn read_until(page: &PageServer, path: &str, word: &str, words: usize) -> Result<usize> {
    let (host, base) = page.url().trim_start_matches("http://").split_once('/').context("no path")?;
    let mut stream = TcpStream::connect(host).await?;
    let request = format!("GET /{base}{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let (word, mut bytes, mut text, mut found) = (word.as_bytes(), 0, Vec::new(), 0);
    while found < words {
        let read = stream.read_buf(&mut text).await?;
        ensure!(read > 0, "{path} has ended after {bytes} bytes, with {found} of {words} entries");
        bytes += read;
        found += text.windows(word.len()).filter(|part| *part == word).count();
        // A word may have come in part.
        text.drain(..text.len().saturating_sub(word.len() - 1));
    }
    Ok(bytes)
}
