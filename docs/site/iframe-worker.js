// Pages that are opened from the disk may not start workers, and the search is one. A frame of the page does as well:
// the search asks for `IFrameWorker` in its parent, and then awaits `importScripts`.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const load = (source) => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        Object.assign(script, {src: source, onload: resolve, onerror: reject})
        inside.document.body.append(script)
      })
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source)
      }
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}))
      const ready = load(url)
      this.postMessage = (data) => ready.then(() => inside.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
}
