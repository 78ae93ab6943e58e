//! A site: boxes behind one thin uplink, and what one image costs them: the traffic on the uplink, the time, and CPU and
//! memory of each box. For tests of sites, and for `make site`.
//!
//! ```text
//!  Plan ─▶ Boxes (cluster, cloud, registry, Lan, an agent and a containerd in each box)
//!            └─ Run::begin ─▶ (faults) ─▶ Run::finish ─▶ Row
//! ```

mod faults;
mod figures;
mod liar;
mod run;
mod scene;
pub mod stolen;

pub use faults::{Fault, Strike, Struck, strike};
pub use figures::{OfProcess, Row};
pub use liar::{Answer, Liar};
pub use run::{Order, Run};
pub use scene::{Boxes, Plan, SERVING, SITE, SiteBox};
pub use stolen::Stolen;
