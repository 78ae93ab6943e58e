//! The fence of the leader's client: mutating requests pass only while this replica leads. It is the
//! last layer before the request is sent, behind everything that may delay it.

use std::future::{Ready, ready};
use std::task::{Context, Poll};

use futures::future::Either;
use hyper::{Request, Response};
use kube::client::Body;
use tower::{BoxError, Layer, Service};

use super::leadership::Leadership;

/// The layer for the client of the leader's work. The Lease itself goes through another client.
#[derive(Clone, Debug)]
pub(crate) struct Fence(pub(crate) Leadership);

#[derive(Clone, Debug)]
pub(crate) struct Fenced<S> {
    inner: S,
    leadership: Leadership,
}

/// The request was not sent, because it would change something and this replica does not lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this replica does not lead any more: nothing is written")]
pub(crate) struct NotTheLeader;

impl<S> Layer<S> for Fence {
    type Service = Fenced<S>;

    fn layer(&self, inner: S) -> Fenced<S> {
        Fenced { inner, leadership: self.0.clone() }
    }
}

impl<S, B> Service<Request<Body>> for Fenced<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = Either<S::Future, Ready<Result<Response<B>, BoxError>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.method().is_safe() || self.leadership.is_leader() {
            Either::Left(self.inner.call(request))
        } else {
            Either::Right(ready(Err(Box::new(NotTheLeader))))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use hyper::Method;

    use super::*;

    /// Accepts every request.
    struct Server;

    impl Service<Request<Body>> for Server {
        type Response = Response<()>;
        type Error = BoxError;
        type Future = Ready<Result<Response<()>, BoxError>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<Body>) -> Self::Future {
            ready(Ok(Response::new(())))
        }
    }

    #[tokio::test]
    async fn a_standby_reads_but_never_writes() {
        let leadership = Leadership::standby();
        let mut server = Fence(leadership.clone()).layer(Server);
        let mut passes = async |method: Method| {
            let request = Request::builder().method(method).body(Body::empty()).unwrap();
            server.call(request).await.map_err(|error| error.downcast_ref::<NotTheLeader>().copied()).is_ok()
        };
        let writes = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
        assert!(passes(Method::GET).await);
        for method in writes.clone() {
            assert!(!passes(method).await);
        }
        let now = Instant::now();
        assert!(leadership.leads_until(now + Duration::from_secs(60), now));
        for method in writes.clone() {
            assert!(passes(method).await);
        }
        leadership.release();
        assert!(passes(Method::GET).await);
        for method in writes {
            assert!(!passes(method).await);
        }
    }
}
