//! `make site`: one image for the boxes of a site behind one thin uplink, with the traffic on the uplink, the time, and
//! CPU and memory of each box. For operators who want to know the effect on their site, and for tests of sites.
//!
//! ```text
//!  Options ─▶ Boxes (cluster, cloud, registry, Lan, an agent and a containerd in each box)
//!               └─ rows: Run::begin ─▶ (faults) ─▶ Run::finish ─▶ Figures ─▶ table, JSON
//! ```

mod faults;
mod figures;
mod liar;
mod options;
mod rows;
mod run;
mod scene;
pub mod stolen;
mod table;

use std::process::ExitCode;

use crate::measured::{Teller, measured, write_json};

pub use faults::{Fault, Strike, Struck, strike};
pub use figures::{Figures, OfProcess, Row};
pub use liar::{Answer, Liar};
pub use options::{Options, SERVING};
pub use run::{Order, Run};
pub use scene::{Boxes, Plan, SITE, SiteBox};
pub use stolen::Stolen;

/// Runs the program. The exit status is 0 if every job ended as it should have.
pub async fn run(options: Options) -> ExitCode {
    let teller = Teller::new();
    let measure = async {
        let figures = rows::measure(&options, &teller).await?;
        table::print(&figures);
        if let Some(file) = &options.json {
            write_json(file, &figures)?;
        }
        Ok(true)
    };
    measured(&teller, measure).await
}
