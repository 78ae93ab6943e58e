//! Addresses of cloudcore, requests to it, and explanations of connection failures.

mod explain;
mod request;
mod url;
mod urls;

pub use explain::Trouble;
pub(crate) use explain::{PinMismatch, printable};
pub use request::RequestError;
pub(crate) use request::post_to_any;
pub use url::BadUrl;
pub(crate) use url::{CONNECT_DEADLINE, ENROLL_SCHEME, Endpoint, TUNNEL_SCHEME, parse_host};
pub use urls::Urls;
pub(crate) use urls::{parse_enroll_url, parse_tunnel_url};
