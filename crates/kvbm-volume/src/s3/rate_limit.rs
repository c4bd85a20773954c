//! Limits requests to a store: at most the configured number at a time, and none while the store
//! asks for a pause (`Retry-After`).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::{Duration, Instant};

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::error::Elapsed;

/// A store that asks for more is asked again after so long: it may have recovered, or mean
/// something else.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

tokio::task_local! {
    /// When what runs is given up.
    static DEADLINE: Instant;
}

/// What comes of `work`, which is dropped at `deadline`. Requests of it that the store does not
/// want before then fail at once.
pub(super) async fn until<F: Future>(deadline: Instant, work: F) -> Result<F::Output, Elapsed> {
    tokio::time::timeout_at(deadline.into(), DEADLINE.scope(deadline, work)).await
}

/// Makes clients that are courteous.
#[derive(Debug)]
pub(super) struct Courteous {
    /// Requests at a time.
    pub(super) concurrency: usize,
}

impl HttpConnector for Courteous {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        let permits = Semaphore::new(self.concurrency);
        Ok(HttpClient::new(RateLimit { client, permits, pause: Mutex::default() }))
    }
}

#[derive(Debug)]
struct RateLimit {
    client: HttpClient,
    permits: Semaphore,
    pause: Mutex<Option<Pause>>,
}

/// A store wants no requests for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pause {
    until: Instant,
    /// What it answered.
    status: u16,
}

impl RateLimit {
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        // Who waits for the store keeps nobody from asking who comes later, and learns at once that
        // the pause is too long.
        let _permit = loop {
            self.wait().await?;
            // It is never closed.
            let permit = self.permits.acquire().await;
            if self.pause().is_none() {
                break permit;
            }
        };
        let answer = self.client.execute(request).await?;
        let header = answer.headers().get("retry-after").and_then(|value| value.to_str().ok());
        if let Some(pause) = pause(answer.status().as_u16(), header, Instant::now()) {
            let mut known = self.pause.lock();
            *known = known.filter(|known| known.until > pause.until).or(Some(pause));
        }
        Ok(answer)
    }

    /// The pause that lasts still.
    fn pause(&self) -> Option<Pause> {
        self.pause.lock().filter(|pause| pause.until > Instant::now())
    }

    /// Waits until the store may be asked, unless that is too late for who asks.
    async fn wait(&self) -> Result<(), HttpError> {
        let Some(Pause { until, status }) = self.pause() else { return Ok(()) };
        if DEADLINE.try_with(|deadline| *deadline <= until).unwrap_or(false) {
            let seconds = until.saturating_duration_since(Instant::now()).as_secs_f32().ceil();
            let text = format!(
                "it answered {status} and requested no calls for {seconds} s more; where this lasts, lower the option concurrency"
            );
            // Of a kind that is not tried again.
            return Err(HttpError::new(HttpErrorKind::Unknown, io::Error::other(text)));
        }
        tokio::time::sleep_until(until.into()).await;
        Ok(())
    }
}

impl HttpService for RateLimit {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.send(request))
    }
}

/// The pause that an answer asks for: a number of seconds. A date, which it may be as well, is not
/// read.
fn pause(status: u16, header: Option<&str>, now: Instant) -> Option<Pause> {
    let seconds = header.filter(|_| matches!(status, 429 | 503))?.trim().parse().ok()?;
    let pause = Duration::from_secs(seconds).min(LONGEST_PAUSE);
    Some(Pause { until: kvbm_plan::deadline_after(now, pause), status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_busy_store_that_gives_seconds_is_waited_for_and_not_for_ever() {
        let now = Instant::now();
        let after = |seconds| Some(Duration::from_secs(seconds));
        for (status, header, expected) in [
            (503, Some("3"), after(3)),
            (429, Some(" 0 "), after(0)),
            (503, Some("18446744073709551615"), Some(LONGEST_PAUSE)),
            (503, None, None),
            (503, Some("-1"), None),
            (503, Some("Wed, 21 Oct 2015 07:28:00 GMT"), None),
            (500, Some("3"), None),
            (200, Some("3"), None),
        ] {
            let expected = expected.map(|after| Pause { until: now + after, status });
            assert_eq!(pause(status, header, now), expected, "{status} {header:?}");
        }
    }
    /// Answers that it is busy.
    #[derive(Debug)]
    struct Busy;

    impl HttpService for Busy {
        fn call<'a, 'b>(
            &'a self,
            _request: HttpRequest,
        ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
        where
            'a: 'b,
            Self: 'b,
        {
            let mut answer = HttpResponse::new(String::new().into());
            *answer.status_mut() = 503.try_into().unwrap();
            answer.headers_mut().insert("retry-after", "30".parse().unwrap());
            Box::pin(std::future::ready(Ok(answer)))
        }
    }

    /// Mutation that makes it fail: `send` takes its permit before it waits.
    #[test]
    fn a_pause_that_is_too_long_is_reported_at_once_though_others_have_all_permits() {
        let rate_limit =
            RateLimit { client: HttpClient::new(Busy), permits: Semaphore::new(1), pause: Mutex::default() };
        let ask = || rate_limit.send(HttpRequest::new(String::new().into()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            assert_eq!(ask().await.unwrap().status().as_u16(), 503);
            let _others = rate_limit.permits.acquire().await;
            let answer = until(Instant::now() + Duration::from_secs(10), ask()).await;
            let answer = answer.expect("before its deadline").unwrap_err();
            let source = std::error::Error::source(&answer).map(ToString::to_string);
            assert!(
                source.as_ref().is_some_and(|text| text.contains("for 30 s more")),
                "{answer}: {source:?}"
            );
        });
    }
}
