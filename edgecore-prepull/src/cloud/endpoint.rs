//! Addresses of cloudcore, requests to it, and explanations of connection failures.

mod explain;
mod request;
mod url;
mod urls;

pub use explain::ConnectTrouble;
pub(crate) use explain::{PinMismatch, printable_start};
pub use request::RequestError;
pub(crate) use request::post_to_any;
pub use url::BadUrl;
pub(crate) use url::{CONNECT_DEADLINE, CloudEndpoint, ENROLL_SCHEME, TUNNEL_SCHEME, parse_host};
pub use urls::Urls;
pub(crate) use urls::{parse_enroll_url, parse_tunnel_url};
