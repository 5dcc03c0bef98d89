//! A streamed answer: the body of a response that pulls events from the engine as the client takes bytes.
//! A client that goes away drops it, and with it the generation. Knows no field names.

use crate::answer::Answer;
use crate::error::ApiError;
use crate::format::AnswerFormat;
use crate::generation::{Generation, cut_short};
use bytes::{Bytes, BytesMut};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};
use tokio_stream::Stream;

/// Events that are ready are sent together up to about this many bytes.
const COALESCE_BYTES: usize = 16 << 10;

/// Server-sent events of one answer.
pub(crate) struct EventStream<F> {
    /// `None` once the answer is over: blocks are freed before the last bytes are taken.
    generation: Option<Generation>,
    answer: Answer,
    format: F,
    include_usage: bool,
    keepalive: Option<KeepAlive>,
}

struct KeepAlive {
    interval: Duration,
    timer: Pin<Box<Sleep>>,
}

impl<F: AnswerFormat> EventStream<F> {
    pub(crate) fn new(
        generation: Generation,
        answer: Answer,
        format: F,
        include_usage: bool,
        keepalive: Option<Duration>,
    ) -> Self {
        let keepalive = keepalive.map(|interval| KeepAlive { interval, timer: Box::pin(sleep(interval)) });
        Self { generation: Some(generation), answer, format, include_usage, keepalive }
    }

    /// Appends what the engine has said since; whether the engine has to be asked again later.
    fn pull(&mut self, cx: &mut Context<'_>, out: &mut BytesMut) -> Result<(), ApiError> {
        while let Some(generation) = &mut self.generation {
            if out.len() >= COALESCE_BYTES {
                return Ok(());
            }
            let Poll::Ready(event) = generation.poll_next(cx) else {
                return Ok(());
            };
            let event = event.ok_or_else(cut_short)?;
            let Some(output) = self.answer.apply(event, generation)? else {
                continue;
            };
            self.format.events(&self.answer, output, out).map_err(unwritable)?;
            if self.answer.is_complete() {
                self.generation = None;
                if self.include_usage {
                    self.format.usage_event(self.answer.usage(), out).map_err(unwritable)?;
                }
                out.extend_from_slice(b"data: [DONE]\n\n");
            }
        }
        Ok(())
    }
}

fn unwritable(error: serde_json::Error) -> ApiError {
    ApiError::internal(format!("The answer could not be written: {error}."))
}

impl<F: AnswerFormat> Stream for EventStream<F> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let mut out = BytesMut::new();
        if let Err(error) = this.pull(cx, &mut out) {
            this.generation = None;
            out.extend_from_slice(format!("data: {}\n\n", error.to_json()).as_bytes());
        }
        if !out.is_empty() {
            if let Some(keepalive) = &mut this.keepalive {
                keepalive.timer.as_mut().reset(Instant::now() + keepalive.interval);
            }
            return Poll::Ready(Some(Ok(out.freeze())));
        }
        if this.generation.is_none() {
            return Poll::Ready(None);
        }
        if let Some(keepalive) = &mut this.keepalive
            && keepalive.timer.as_mut().poll(cx).is_ready()
        {
            keepalive.timer.as_mut().reset(Instant::now() + keepalive.interval);
            return Poll::Ready(Some(Ok(Bytes::from_static(b": keep-alive\n\n"))));
        }
        Poll::Pending
    }
}
