// Search from the disk: a page that is opened as a file may start no worker, so the worker's script runs in a frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const { contentDocument: page, contentWindow: scope } = frame;
      page.open();
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope = new Promise((ready) => (scope.started = () => ready(scope)));
      page.write(`<script src="${new URL(url, location)}" onload="started()"></script>`);
      page.close();
    }
    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
